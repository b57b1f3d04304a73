"""Measures a draft: every k and the target alone, interleaved on the same prompts; compares the texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec.settings import LOOKUP, MOST, Settings
from quantkit.serving.specdec.transformers import Pair, Run

Repeats = Sequence[Sequence[Run]]  # by repeat, then by prompt


def measure(
    draft: Checkpoint | None, pair: Pair, settings: Settings, counting: Callable[[int, int], None]
) -> dict[str, Any]:
    """Measure a draft and return its record. counting: called with the numbers of runs done and planned.

    alone: the target without a draft; seconds for all texts, step_seconds per decoded token. swept: results
    of `sweep`. alpha, cost: α and c over all k. Three best k (0: do not draft) with speed-ups: measured: best
    of the k tried, for the whole call; in_theory: from alpha and cost, k up to MOST; by_bytes: from alpha and
    cost_by_bytes, the ratio of the models' sizes on disk. proof: comparison of the texts.
    """
    sizes = pair.load(draft)
    planned, done = (1 + len(settings.ks)) * (settings.prompts * settings.repeats + 1), itertools.count(1)

    def run(prompt: int, k: int, repeat: int) -> Run:
        place = (repeat * settings.prompts + prompt) * (MOST + 1) + k  # another seed for each run
        made = pair.run(prompt, k, (settings.seed * 1_000_003 + place) % 2**31)
        counting(next(done), planned)
        return made

    ks = [0, *settings.ks]
    for k in ks:
        run(0, k, 0)
    found: dict[int, list[list[Run]]] = {k: [[] for _ in range(settings.repeats)] for k in ks}
    turns = itertools.product(range(settings.repeats), range(settings.prompts))
    for turn, (repeat, prompt) in enumerate(turns):
        by = turn % len(ks)  # each k is the first in its turn
        for k in (*ks[by:], *ks[:by]):
            found[k][repeat].append(run(prompt, k, repeat))
    step = _spread(map(_decoding, found[0]))
    swept = [sweep(k, found[k], found[0]) for k in settings.ks]
    judged = sum(row["judged"] for row in swept)  # each k weighs as much as it has judged tokens
    alpha = sum((row["alpha"] or 0.0) * row["judged"] for row in swept) / judged if judged else None
    cost = float(np.median([row["cost"] for row in swept]))
    by_bytes = sizes["draft_memory"]["stored"] / sizes["target_memory"]["stored"] if draft else 0.0
    best = max(swept, key=lambda row: row["net"]["median"])
    seconds = _spread(_sum(runs, "seconds") for runs in found[0])
    return {
        "draft": draft.source if draft else LOOKUP,
        "engine": pair.name,
        "alone": {"seconds": seconds, "step_seconds": step, "tokens_per_second": 1 / step["median"]},
        "swept": swept,
        "alpha": alpha,
        "cost": cost,
        "in_theory": _in_theory(swept, alpha, cost, draft is not None),
        "measured": {"k": best["k"], "speedup": best["net"]["median"]},
        "cost_by_bytes": by_bytes,
        "by_bytes": _in_theory(swept, alpha, by_bytes, draft is not None),
        "proof": None if settings.temperature else _prove(pair, found),
    } | sizes


def sweep(k: int, repeats: Repeats, alone: Repeats) -> dict[str, Any]:
    """Return the figures of one k. repeats, alone: runs with the draft and of the target alone, per repeat.

    tokens_per_step: mean; expected_tokens: mean by equation 1, from α and each step's drafted tokens.
    histogram: number of steps that accepted 0, 1, …, k tokens. cost, check: c and v (see acceptance_rate.py).
    Speed-ups: expected by theory; decode as measured, without the prompts' passes; net for the whole call.
    seconds: time of all texts.
    """
    runs = list(itertools.chain(*repeats))
    steps = [step for run in runs for step in run.steps]
    each = sum(step.drafted for step in steps) / len(steps)
    alpha, judged = acceptance_rate.acceptance(steps)
    tokens = [acceptance_rate.tokens_of_step(alpha or 0.0, step.drafted) for step in steps]
    # the first pass of each text reads its prompt
    step = np.median([_decoding(plain) for plain in alone])
    later = sum(one.drafted for run in runs for one in run.steps[1:])
    cost = float(_sum(runs, "drafting") / step / later) if later else 0.0
    return {
        "k": k,
        "tokens_per_step": sum(step.tokens for step in steps) / len(steps),
        "expected_tokens": float(np.mean(tokens)),
        "drafted_per_step": each,
        "alpha": alpha,
        "alpha_error": None if alpha is None else acceptance_rate.standard_error(alpha, judged),
        "judged": judged,
        "histogram": np.bincount([one.accepted for one in steps if one.drafted], minlength=k + 1).tolist(),
        "cost": cost,
        "check": float(_sum(runs, "checking") / step / max(1, len(steps) - len(runs))),
        "expected": float(np.mean(tokens)) / (each * cost + 1),
        "decode": _gain(_decoding, alone, repeats),
        "net": _gain(lambda found: _sum(found, "seconds") / _tokens(found), alone, repeats),
        "seconds": _spread(_sum(repeat, "seconds") for repeat in repeats),
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, low (minimum) and high (maximum) of the repeats' values."""
    return dict(zip(("median", "low", "high"), np.quantile(list(values), (0.5, 0, 1)).tolist(), strict=True))


def _sum(runs: Iterable[Run], name: str) -> float:
    return sum(getattr(run, name) for run in runs)


def _tokens(runs: Iterable[Run]) -> int:
    return sum(len(run.ids) for run in runs)


def _decoding(runs: Sequence[Run]) -> float:
    """Return the mean seconds per decoded token."""
    return _sum(runs, "decode_seconds") / max(1, _sum(runs, "decoded"))


def _gain(seconds: Callable[[Sequence[Run]], float], alone: Repeats, repeats: Repeats) -> dict[str, float]:
    """Return the spread of speed-ups. Each compares runs of one repeat, since other load slows both."""
    pairs = zip(alone, repeats, strict=True)
    return _spread(seconds(plain) / max(seconds(runs), 1e-12) for plain, runs in pairs)


def _in_theory(
    swept: Sequence[Mapping[str, Any]], alpha: float | None, cost: float, model: bool
) -> dict[str, float]:
    """Return the best k and its speed-up by α and c. For prompt-lookup, which often drafts nothing, only the
    k tried are considered."""
    gains = {0: 1.0}
    if alpha is not None and model:
        gains = {(k := acceptance_rate.best_k(alpha, cost)): acceptance_rate.speedup(alpha, cost, k)}
    elif alpha is not None:
        gains |= {row["k"]: row["expected_tokens"] / (row["drafted_per_step"] * cost + 1) for row in swept}
    best = max(gains, key=gains.__getitem__)
    return {"k": best, "speedup": gains[best]}


def _prove(pair: Pair, found: Mapping[int, Repeats]) -> dict[str, Any]:
    """Compare drafted texts with the target's own; return the numbers of texts, equal texts and equal tokens.
    partings: first difference of each other text. `alike`: whether rounding explains all differences."""
    partings, texts, tokens = [], 0, 0
    for k, (prompt, own) in itertools.product([*found][1:], enumerate(found[0][0])):
        for one in {tuple(runs[prompt].ids): runs[prompt] for runs in found[k]}.values():
            texts += 1  # usually one per prompt and k
            parted = pair.part(prompt, k, own, one)
            tokens += len(own.ids) if parted is None else parted["index"]
            partings += [] if parted is None else [{"prompt": prompt, "k": k} | parted]
    counts = {"texts": texts, "equal": texts - len(partings), "tokens": tokens, "partings": partings}
    return counts | {"alike": all(parted["tie"] for parted in partings)}
