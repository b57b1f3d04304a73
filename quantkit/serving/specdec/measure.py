"""A draft measured: every k beside the target alone, on the same prompts, interleaved; then the proof."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.capacity.source import cache_bytes
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec.acceptance_rate import Step
from quantkit.serving.specdec.lossless import Greedy, Parting, Uniformity
from quantkit.serving.specdec.settings import LOOKUP, MOST, Settings


@dataclass(frozen=True)
class Footprint:
    """Bytes: of the weights in memory, of keys and values of one text (None where they are not known), and of
    the tensors as they lie on disk. kernels: what multiplies; note: why weights are not packed in memory."""

    weights: int
    kv: int | None
    stored: int
    kernels: str
    note: str = ""


@dataclass(frozen=True)
class Run:
    """One text of so many new tokens, as ids or text, whatever the engine tells.

    passes: of the target, for drafted tokens of which so many were accepted. steps: each pass by itself; none
    where the engine tells totals only, which then leave out what the prompt's pass yielded. seconds: the
    whole call; decode_seconds: after the `first_tokens`. drafting, checking: what these are made of, between
    passes of the target, and from the start of a pass until its tokens are chosen; None where not told.
    """

    tokens: int
    seconds: float
    decode_seconds: float
    first_tokens: int
    passes: int
    drafted: int
    accepted: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    drafting: float | None = None
    checking: float | None = None

    @property
    def decoded(self) -> int:
        """Tokens that came after the first ones."""
        return self.tokens - self.first_tokens


class Engine:
    """A target, for one draft after the other (None: prompt-lookup). name: with its version; precision: of
    both models; cache: of keys and values; reloads: whether another k than before is loaded anew."""

    name = precision = cache = ""
    reloads = False

    def __init__(self, target: Checkpoint, prompts: Tensor, settings: Settings, device: torch.device):
        """prompts: int64 `[prompts, tokens]`."""
        self.target, self.prompts, self.settings, self.device = target, prompts, settings, device

    def load(self, draft: Checkpoint | None) -> tuple[Footprint, Footprint | None]:
        """Take this draft from now on; return what target and draft take."""
        raise NotImplementedError

    def run(self, prompt: int, k: int, seed: int) -> Run:
        """Continue a prompt, by its number; k = 0: the target alone."""
        raise NotImplementedError

    def part(self, prompt: int, k: int, own: Run, drafted: Run) -> Parting | None:
        """Return where a drafted text leaves the target's own."""
        raise NotImplementedError

    def draft_step(self) -> float | None:
        """Return the seconds of a drafted token; None where runs tell them."""

    def uniformity(self, texts: Sequence[tuple[int, list[int]]], seed: int) -> Uniformity | None:
        """Return whether sampled texts, (prompt, ids) each, follow the target's distribution; None where the
        engine does not tell distributions."""

    def close(self) -> None:
        """Free the draft."""

    def footprint(self, checkpoint: Checkpoint, loaded: Any = None) -> Footprint:
        """Of a checkpoint, as transformers has `loaded` it, else as it is stored."""
        stored = sum(info.nbytes for info in checkpoint.infos.values())
        tokens = self.settings.prompt_tokens + self.settings.tokens
        kv = cache_bytes(checkpoint.folder, tokens, self.cache)
        if loaded is None:
            return Footprint(stored, kv, stored, "ggml")
        return Footprint(loaded.weight_bytes, kv, stored, loaded.kernels, loaded.note)


Repeats = Sequence[Sequence[Run]]  # by repeat, then by prompt


def measure(
    draft: Checkpoint | None,
    engine: Engine,
    settings: Settings,
    sizes: tuple[Footprint, Footprint | None],
    counting: Callable[[int, int], None],
) -> dict[str, Any]:
    """Warm up, run everything `settings.repeats` times, sum up, prove. counting: told runs done and in all.

    Returns the record of a draft. alone: the target without it, of which seconds are of all texts, and
    step_seconds of a token once decoding. swept: see `sweep`. alpha, cost: α and c of all k together.
    drafting: what c is made of, where runs tell it: drafting k tokens takes fixed + per_token · k steps of
    the target (fixed is the engine's own). Best k (0: not drafting) and its speed-up: in_theory as α and c
    give it, of any up to MOST; measured of those that were tried, net; by_bytes in theory where a step takes
    as long as its weights, as stored, take to be read, which is c = cost_by_bytes.
    """

    planned, done = (1 + len(settings.ks)) * (settings.prompts * settings.repeats + 1), itertools.count(1)

    def run(prompt: int, k: int, repeat: int) -> Run:
        made = engine.run(prompt, k, _seed(settings, repeat, prompt, k))
        counting(now := next(done), max(planned, now))  # a proof that draws more moves the end
        return made

    found: dict[int, list[list[Run]]] = {k: [] for k in (0, *settings.ks)}
    for k in found:
        run(0, k, 0)
    for repeat in range(settings.repeats):
        for runs in found.values():
            runs.append([])
        for prompt, k in _order([*found], repeat, settings.prompts, engine.reloads):
            found[k][repeat].append(run(prompt, k, repeat))
    step, told = _spread(map(_decoding, found[0])), engine.draft_step()
    cost = None if told is None else told / step["median"]
    swept = [sweep(k, found[k], found[0], cost) for k in settings.ks]
    judged = sum(row["judged"] for row in swept)  # each k weighs as much as it has judged tokens
    alpha = sum((row["alpha"] or 0.0) * row["judged"] for row in swept) / judged if judged else None
    whole = float(np.median([row["cost"] for row in swept])) if cost is None else cost
    target, small = sizes
    by_bytes = small.stored / target.stored if small else 0.0
    best = max(swept, key=lambda row: row["net"]["median"])
    seconds = _spread(_sum(runs, "seconds") for runs in found[0])
    proof = _prove(engine, found, settings, run)
    return {
        "draft": draft.source if draft else LOOKUP,
        "engine": engine.name,
        "alone": {"seconds": seconds, "step_seconds": step, "tokens_per_second": 1 / step["median"]},
        "swept": swept,
        "alpha": alpha,
        "cost": whole,
        "drafting": _drafting(swept) if cost is None and draft else None,
        "in_theory": _in_theory(swept, alpha, whole, draft is not None),
        "measured": {"k": best["k"], "speedup": best["net"]["median"]},
        "cost_by_bytes": by_bytes,
        "by_bytes": _in_theory(swept, alpha, by_bytes, draft is not None),
        "proof": proof and {**asdict(proof), "alike": proof.alike},
        "target_memory": asdict(target),
        "draft_memory": small and asdict(small),
    }


def _order(ks: Sequence[int], repeat: int, prompts: int, reloads: bool) -> Iterator[tuple[int, int]]:
    """Every (prompt, k) of a repeat: all k of a prompt, or, to load seldom, all prompts of a k. Each k is
    the first in its turn."""
    for place in range(1 if reloads else prompts):
        by = (repeat if reloads else repeat * prompts + place) % len(ks)
        for k in (*ks[by:], *ks[:by]):
            yield from ((prompt, k) for prompt in (range(prompts) if reloads else (place,)))


def _seed(settings: Settings, repeat: int, prompt: int, k: int) -> int:
    """One for each run: a proof of a distribution takes every text for another draw."""
    place = (repeat * settings.prompts + prompt) * (MOST + 1) + k
    return (settings.seed * 1_000_003 + place) % 2**31


def sweep(k: int, repeats: Repeats, alone: Repeats, cost: float | None = None) -> dict[str, Any]:
    """Sum up one k. alone: runs of the target in the same repeats; cost: c where runs do not tell it.

    tokens_per_step: mean; expected_tokens: by α (equation 1), for as many tokens as each step was given.
    histogram: steps with 0 to k accepted tokens, None where only totals are known. check: the paper's v.
    expected, decode: speed-up by theory and as measured, after the first tokens. net: speed-up of the whole
    call, both models' prompts included; seconds: of all texts.
    """
    runs = list(itertools.chain(*repeats))
    step = float(np.median([_decoding(plain) for plain in alone]))
    passes, drafted = _sum(runs, "passes"), _sum(runs, "drafted")
    each = drafted / passes if passes else 0.0
    steps, histogram, error = [step for run in runs for step in run.steps], None, None
    if steps:
        unit = step * max(1, passes - len(runs))  # the first pass of each text reads its prompt
        cost = _sum(runs, "drafting") / unit / each if each else 0.0
        check = _sum(runs, "checking") / unit
        alpha, judged = acceptance_rate.acceptance(steps)
        error = None if alpha is None else acceptance_rate.standard_error(alpha, judged)
        tokens = _sum(runs, "tokens")
        expected = float(
            np.mean([acceptance_rate.tokens_of_step(alpha or 0.0, one.drafted) for one in steps])
        )
        histogram = np.bincount([one.accepted for one in steps if one.drafted], minlength=k + 1).tolist()
    else:
        check = _sum(runs, "decode_seconds") / (step * max(1, passes)) - each * cost
        full, judged = drafted / k, drafted  # passes, if each had k tokens to check
        alpha = acceptance_rate.acceptance_of_mean(1 + _sum(runs, "accepted") / full, k) if drafted else None
        tokens = _sum(runs, "decoded")
        expected = 1 + full / max(1, passes) * (acceptance_rate.tokens_of_step(alpha or 0.0, k) - 1)
    return {
        "k": k,
        "tokens_per_step": tokens / max(1, passes),
        "expected_tokens": expected,
        "drafted_per_step": each,
        "alpha": alpha,
        "alpha_error": error,
        "judged": judged,
        "histogram": histogram,
        "cost": cost,
        "check": check,
        "expected": expected / (each * cost + 1),
        "decode": _gain(_decoding, alone, repeats),
        "net": _gain(lambda found: _sum(found, "seconds") / _sum(found, "tokens"), alone, repeats),
        "seconds": _spread(_sum(repeat, "seconds") for repeat in repeats),
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Median over repeats, and the least and the largest of them."""
    return dict(zip(("median", "low", "high"), np.quantile(list(values), (0.5, 0, 1)).tolist(), strict=True))


def _sum(runs: Iterable[Run], name: str) -> float:
    return sum(getattr(run, name) for run in runs)


def _decoding(runs: Sequence[Run]) -> float:
    """Seconds of a token once decoding."""
    return _sum(runs, "decode_seconds") / max(1, _sum(runs, "decoded"))


def _gain(seconds: Callable[[Sequence[Run]], float], alone: Repeats, repeats: Repeats) -> dict[str, float]:
    """Repeat by repeat: what slows the machine down meanwhile slows both."""
    pairs = zip(alone, repeats, strict=True)
    return _spread(seconds(plain) / max(seconds(runs), 1e-12) for plain, runs in pairs)


def _drafting(swept: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """None with a single k, which cannot tell the two apart."""
    if len(swept) < 2:
        return None
    drafted = np.array([row["drafted_per_step"] for row in swept])
    per_token, fixed = np.polyfit(drafted, drafted * [row["cost"] for row in swept], 1).tolist()
    return {"fixed": fixed, "per_token": per_token}


def _in_theory(
    swept: Sequence[Mapping[str, Any]], alpha: float | None, cost: float, model: bool
) -> dict[str, float]:
    """By α and c; for a look-up, which often finds nothing to draft, of the k that were tried."""
    gains = {0: 1.0}
    if alpha is not None and model:
        gains = {(k := acceptance_rate.best_k(alpha, cost)): acceptance_rate.speedup(alpha, cost, k)}
    elif alpha is not None:
        gains |= {row["k"]: row["expected_tokens"] / (row["drafted_per_step"] * cost + 1) for row in swept}
    best = max(gains, key=gains.__getitem__)
    return {"k": best, "speedup": gains[best]}


def _prove(
    engine: Engine,
    found: dict[int, list[list[Run]]],
    settings: Settings,
    run: Callable[[int, int, int], Run],
) -> Greedy | Uniformity | None:
    """Compare greedy texts with the target's own; test sampled ones, of at least `settings.proof` tokens."""
    first = found[0][0]  # the target's own texts
    if not settings.temperature:
        partings, texts, tokens = [], 0, 0
        for k, prompt in itertools.product(settings.ks, range(len(first))):
            own = first[prompt]
            for one in {(*runs[prompt].ids, runs[prompt].text): runs[prompt] for runs in found[k]}.values():
                texts += 1  # one of each prompt and k: the same each time, one hopes
                parted = engine.part(prompt, k, own, one)
                tokens += own.tokens if parted is None else parted.index
                partings += [] if parted is None else [parted]
        return Greedy(texts, texts - len(partings), tokens, partings)
    drawn = [(prompt, one.ids) for k in settings.ks for runs in found[k] for prompt, one in enumerate(runs)]
    for turn in itertools.count():
        if sum(len(ids) for _, ids in drawn) >= (settings.proof or 0):
            return engine.uniformity(drawn, settings.seed)
        again, prompt = divmod(turn, len(first))
        k = settings.ks[again % len(settings.ks)]
        drawn.append((prompt, run(prompt, k, settings.repeats + again).ids))
