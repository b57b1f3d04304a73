"""Measures drafts: every k and the target alone, interleaved on the same prompts; compares the texts."""

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from quantkit.capacity.source import cache_bytes
from quantkit.errors import UNSUPPORTED, USAGE, VERIFICATION, QuantkitError, require
from quantkit.evaluation.evaluate import check_comparable
from quantkit.evaluation.generate import shared_dtype
from quantkit.evaluation.sampling import Sampling, ends_of_text
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.models.machine.memory import return_freed_pages
from quantkit.options import CalibrationOptions
from quantkit.quantize.progress import Progress
from quantkit.serving.engines import transformers as engine
from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec import transformers as assisted
from quantkit.serving.specdec.settings import LOOKUP, MOST, SpecdecSettings
from quantkit.serving.specdec.transformers import DraftedText
from quantkit.text import calibration

SCHEMA = "quantkit.specdec/2"
Repeats = Sequence[Sequence[DraftedText]]  # by repeat, then by prompt


def refuse_unlike(record: dict[str, Any]) -> None:
    """Raise QuantkitError (exit code 6) if a draft changed the text more than rounding can explain."""
    unlike = [row["draft"] for row in record["drafts"] if row["proof"] and not row["proof"]["alike"]]
    if unlike:
        what = f"text drafted by {', '.join(unlike)} differs from text of the target alone"
        hint = "do not use this pair: the rule that accepts tokens is wrong, or a kernel"
        raise QuantkitError(what, hint, VERIFICATION, record)


def compare(
    target: Checkpoint, drafts: Sequence[Checkpoint | None], settings: SpecdecSettings, progress: Progress
) -> dict[str, Any]:
    """Measure every draft (None: prompt-lookup) and the target alone; return the versioned JSON.

    drafts: the results of `figures`. prompts_sha256: hash of the prompts' token ids (int64, little-endian).
    Raises QuantkitError before loading if vocabularies differ or a context is too short, and later if memory
    is too small (exit code 5) or a model has a recurrent state (4).
    """
    device = choose_device(settings.device)
    dtype = str(shared_dtype(settings.dtype, target, device)).removeprefix("torch.")
    settings = replace(settings, dtype=dtype)  # drafts compute in the target's
    _check([target, *(draft for draft in drafts if draft is not None)], settings)
    asked = {"samples": settings.prompts, "seqlen": settings.prompt_tokens, "seed": settings.seed}
    asked |= {"calibration": settings.prompt_text and str(settings.prompt_text)}
    text = calibration.load(target, CalibrationOptions(**asked, text_column=settings.text_column))
    prompts = text.tokens.to(device)
    progress.phase(f"loading {target.source}")
    model, target_memory = _load(target, settings)
    measured = []
    for draft in drafts:
        name = draft.source if draft else LOOKUP
        if draft:
            progress.phase(f"loading {name}")
        draft_model, draft_memory = _load(draft, settings) if draft else (None, None)
        counting = partial(progress.counting, f"drafting by {name}")
        texts = interleaved(model, draft_model, prompts, ends_of_text(target), settings, counting)
        by_bytes = draft_memory["stored"] / target_memory["stored"] if draft else 0.0
        row = {"draft": name, "engine": f"transformers {transformers.__version__}"}
        row |= figures(texts, by_bytes, draft is not None)
        row |= {"proof": None if settings.temperature else _prove(model, prompts, texts)}
        measured.append(row | {"target_memory": target_memory, "draft_memory": draft_memory})
        del draft_model  # before the next one is loaded
        gc.collect()
        return_freed_pages()
    recorded = asdict(settings) | {
        "ks": settings.numbers("k"),
        "text": settings.prompt_text.name if settings.prompt_text else "shipped",
        "prompts_sha256": text.provenance.sha256,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    del recorded["k"], recorded["prompt_text"], recorded["text_column"]
    return {"schema": SCHEMA, "target": target.source, "settings": recorded, "drafts": measured}


def _check(models: Sequence[Checkpoint], settings: SpecdecSettings) -> None:
    """Raise QuantkitError if prompt and new tokens exceed a model's context (exit code 2), or if a draft's
    vocabulary differs from the target's (4).

    The logits' widths must be equal too, since the acceptance rule compares both distributions by index.
    """
    needed = settings.prompt_tokens + settings.tokens
    for model in models:
        what = f"{model.source} was made for {model.context} tokens; prompt and new tokens make {needed}"
        hint = f"choose --prompt-tokens and --tokens of at most {model.context} together"
        require(model.context is None or needed <= model.context, what, hint, USAGE)
    hint = "choose a smaller model of its family, a compressed copy of it, or prompt-lookup"
    check_comparable(models, hint)


def _load(checkpoint: Checkpoint, settings: SpecdecSettings) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and {weights: bytes in memory, kv: bytes of the cache of one text or None, stored:
    bytes on disk, kernels: name, note: why weights were decoded}."""
    tokens = settings.prompt_tokens + settings.tokens
    model, facts = engine.load(checkpoint, settings, tokens)
    # transformers refuses recurrent models as targets, and fails with them as drafts
    what = f"{checkpoint.source} keeps a recurrent state, which cannot take tokens back"
    require(not model._is_stateful, what, "choose a model with attention alone", UNSUPPORTED)
    return model, {
        "weights": facts.weight_bytes,
        "kv": cache_bytes(checkpoint.folder, tokens, facts.dtype),
        "stored": checkpoint.stored_bytes,
        "kernels": facts.kernels,
        "note": facts.note,
    }


def interleaved(
    target: nn.Module,
    draft: nn.Module | None,
    prompts: Tensor,
    ends: list[int],
    settings: SpecdecSettings,
    count: Callable[[int, int], None],
) -> dict[int, Repeats]:
    """Return the texts of every k; 0: the target alone. Each k takes turns at being first.

    draft: None for prompt-lookup. ends: ids that end a text. count: receives the numbers of texts done and
    planned.
    """
    ks = [0, *settings.numbers("k")]
    planned, done = len(ks) * (settings.prompts * settings.repeats + 1), itertools.count(1)

    def run(prompt: int, k: int, repeat: int) -> DraftedText:
        number = (repeat * settings.prompts + prompt) * (MOST + 1) + k  # another seed for each run
        seed = (settings.seed * 1_000_003 + number) % 2**31
        how = Sampling(settings.tokens, settings.temperature, seed)
        made = assisted.generate(target, prompts[prompt, None], how, ends, k, draft)
        count(next(done), planned)
        return made

    for k in ks:  # warm up
        run(0, k, 0)
    texts: dict[int, list[list[DraftedText]]] = {k: [[] for _ in range(settings.repeats)] for k in ks}
    turns = itertools.product(range(settings.repeats), range(settings.prompts))
    for turn, (repeat, prompt) in enumerate(turns):
        first = turn % len(ks)
        for k in (*ks[first:], *ks[:first]):
            texts[k][repeat].append(run(prompt, k, repeat))
    return texts


def figures(texts: Mapping[int, Repeats], cost_by_bytes: float, is_model: bool) -> dict[str, Any]:
    """Return the figures of one draft. texts: by k; 0: of the target alone. is_model: not prompt-lookup.

    alone: the target without a draft; seconds for all texts, step_seconds per decoded token. swept: results
    of `sweep`. alpha, cost: α and c over all k. Three best k (0: do not draft) with speed-ups: measured: best
    of the k tried, for the whole call; in_theory: from alpha and cost, k up to MOST; by_bytes: from alpha and
    cost_by_bytes, the ratio of the models' sizes on disk.
    """
    alone = texts[0]
    step = _spread(_decoding(alone))
    swept = [sweep(k, repeats, alone) for k, repeats in texts.items() if k]
    judged = sum(row["judged"] for row in swept)  # each k weighs as much as it has judged tokens
    alpha = sum((row["alpha"] or 0.0) * row["judged"] for row in swept) / judged if judged else None
    cost = float(np.median([row["cost"] for row in swept]))
    best = max(swept, key=lambda row: row["net"]["median"])
    seconds = _spread(_sums(alone, "seconds"))
    return {
        "alone": {"seconds": seconds, "step_seconds": step, "tokens_per_second": 1 / step["median"]},
        "swept": swept,
        "alpha": alpha,
        "cost": cost,
        "in_theory": _in_theory(swept, alpha, cost, is_model),
        "measured": {"k": best["k"], "speedup": best["net"]["median"]},
        "cost_by_bytes": cost_by_bytes,
        "by_bytes": _in_theory(swept, alpha, cost_by_bytes, is_model),
    }


def sweep(k: int, repeats: Repeats, alone: Repeats) -> dict[str, Any]:
    """Return the figures of one k. repeats, alone: texts with the draft and of the target alone, per repeat.

    tokens_per_step: mean; expected_tokens: mean by equation 1, from α and each pass's drafted tokens.
    histogram: number of steps that accepted 0, 1, …, k tokens. cost, check: c and v of acceptance_rate.py.
    Speed-ups: expected by theory; decode as measured, without the prompts' passes; net for the whole call.
    seconds: time of all texts.
    """
    texts = list(itertools.chain(*repeats))
    steps = [step for text in texts for step in text.steps]
    later = sum(step.drafted for text in texts for step in text.steps[1:])  # the first reads a prompt
    drafted = sum(step.drafted for step in steps) / len(steps)
    alpha, judged = acceptance_rate.acceptance(steps)
    tokens = [acceptance_rate.tokens_of_step(alpha or 0.0, step.drafted) for step in steps]
    accepted = [step.accepted for step in steps if step.drafted]
    step_seconds = np.median(_decoding(alone))
    cost = float(_sums(repeats, "drafting").sum() / step_seconds / later) if later else 0.0
    return {
        "k": k,
        "tokens_per_step": sum(step.tokens for step in steps) / len(steps),
        "expected_tokens": float(np.mean(tokens)),
        "drafted_per_step": drafted,
        "alpha": alpha,
        "alpha_error": None if alpha is None else acceptance_rate.standard_error(alpha, judged),
        "judged": judged,
        "histogram": np.bincount(accepted, minlength=k + 1).tolist(),
        "cost": cost,
        "check": float(_sums(repeats, "checking").sum() / step_seconds / max(1, len(steps) - len(texts))),
        "expected": float(np.mean(tokens)) / (drafted * cost + 1),
        "decode": _spread(_decoding(alone) / np.maximum(_decoding(repeats), 1e-12)),
        "net": _spread(_whole(alone) / np.maximum(_whole(repeats), 1e-12)),
        "seconds": _spread(_sums(repeats, "seconds")),
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    """Return median, low (minimum) and high (maximum) of the repeats' values."""
    return dict(zip(("median", "low", "high"), np.quantile(values, (0.5, 0, 1)).tolist(), strict=True))


def _sums(repeats: Repeats, name: str) -> np.ndarray:
    """Return the sum of an attribute over the texts of each repeat. Figures of one repeat are compared with
    those of the same repeat only, since other load slows both."""
    return np.array([sum(getattr(text, name) for text in texts) for texts in repeats])


def _decoding(repeats: Repeats) -> np.ndarray:
    """Return the mean seconds per decoded token of each repeat."""
    return _sums(repeats, "decode_seconds") / np.maximum(_sums(repeats, "decoded"), 1)


def _whole(repeats: Repeats) -> np.ndarray:
    """Return the seconds of the whole calls per new token of each repeat."""
    return _sums(repeats, "seconds") / _sums(repeats, "tokens")


def _in_theory(
    swept: Sequence[Mapping[str, Any]], alpha: float | None, cost: float, is_model: bool
) -> dict[str, float]:
    """Return the best k and its speed-up by α and c. For prompt-lookup, which often drafts nothing, only the
    k tried are considered."""
    gains = {0: 1.0}
    if alpha is not None and is_model:
        gains = {(k := acceptance_rate.best_k(alpha, cost)): acceptance_rate.speedup(alpha, cost, k)}
    elif alpha is not None:
        gains |= {row["k"]: row["expected_tokens"] / (row["drafted_per_step"] * cost + 1) for row in swept}
    best = max(gains, key=gains.__getitem__)
    return {"k": best, "speedup": gains[best]}


def _prove(target: nn.Module, prompts: Tensor, texts: Mapping[int, Repeats]) -> dict[str, Any]:
    """Compare drafted texts with the target's own; return the numbers of texts, equal texts and equal tokens.
    partings: first difference of each other text. `alike`: whether rounding explains all differences."""
    partings, compared, tokens = [], 0, 0
    for k, (prompt, alone) in itertools.product([k for k in texts if k], enumerate(texts[0][0])):
        for ids in dict.fromkeys(tuple(repeat[prompt].ids) for repeat in texts[k]):
            compared += 1  # usually one per prompt and k
            parted = assisted.parting(target, prompts[prompt, None], alone.ids, ids)
            tokens += len(alone.ids) if parted is None else parted["index"]
            partings += [] if parted is None else [{"prompt": prompt, "k": k} | parted]
    counts = {"texts": compared, "equal": compared - len(partings), "tokens": tokens, "partings": partings}
    return counts | {"alike": all(parted["tie"] for parted in partings)}
