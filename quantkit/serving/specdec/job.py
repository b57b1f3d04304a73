"""Checks, loads and measures a target model with one draft model after the other."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import USAGE, VERIFICATION, QuantkitError, require
from quantkit.evaluation.evaluate import check_comparable
from quantkit.evaluation.generate import shared_dtype
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.models.machine.memory import return_freed_pages
from quantkit.options import CalibrationOptions
from quantkit.quantize.progress import Progress
from quantkit.serving.specdec.measure import measure
from quantkit.serving.specdec.settings import LOOKUP, Settings
from quantkit.serving.specdec.transformers import Pair
from quantkit.text import calibration

SCHEMA = "quantkit.specdec/2"


def refuse_unlike(record: dict[str, Any]) -> None:
    """Raise QuantkitError (exit code 6) if a draft changed the text more than rounding can explain."""
    unlike = [row["draft"] for row in record["drafts"] if row["proof"] and not row["proof"]["alike"]]
    if unlike:
        what = f"text drafted by {', '.join(unlike)} differs from text of the target alone"
        hint = "do not use this pair: the rule that accepts tokens is wrong, or a kernel"
        raise QuantkitError(what, hint, VERIFICATION, record)


def compare(
    target: Checkpoint, drafts: Sequence[Checkpoint | None], settings: Settings, progress: Progress
) -> dict[str, Any]:
    """Measure every draft (None: prompt-lookup) and the target alone; return the versioned JSON.

    drafts: the results of `measure`. prompts_sha256: hash of the prompts' token ids (int64, little-endian).
    Raises QuantkitError before loading if vocabularies differ or a context is too short, and later if memory
    is too small.
    """
    device = choose_device(settings.device)
    dtype = shared_dtype(settings.dtype, target, device)
    _check([target, *(draft for draft in drafts if draft is not None)], settings)
    ids = _prompts(target, settings)
    progress.phase(f"loading {target.source}")
    pair, measured = Pair(target, ids, settings, device, dtype), []
    for draft in drafts:
        called = draft.source if draft else LOOKUP
        progress.phase(f"loading {called}")
        measured.append(measure(draft, pair, settings, partial(progress.counting, f"drafting by {called}")))
        pair.close()  # before the next one is loaded
        gc.collect()
        return_freed_pages()
    recorded = asdict(settings) | {
        "ks": settings.ks,
        "text": settings.prompt_text.name if settings.prompt_text else "shipped",
    }
    recorded |= {"prompts_sha256": hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()}
    recorded |= {"dtype": pair.precision, "device": str(device), "threads": torch.get_num_threads()}
    del recorded["k"], recorded["prompt_text"], recorded["text_column"]
    return {"schema": SCHEMA, "target": target.source, "settings": recorded, "drafts": measured}


def _check(models: Sequence[Checkpoint], settings: Settings) -> None:
    """Raise QuantkitError if prompt and new tokens exceed a model's context (exit code 2), or if a draft's
    vocabulary differs from the target's (4).

    The logits' widths must be equal too, since the acceptance rule compares both distributions by index.
    """
    needed = settings.prompt_tokens + settings.tokens
    for model in models:
        what = f"{model.source} was made for {model.context} tokens; prompt and new tokens make {needed}"
        hint = f"choose --prompt-tokens and --tokens of at most {model.context} together"
        require(model.context is None or needed <= model.context, what, hint, USAGE)
    check_comparable(
        models, "choose a smaller model of its family, a compressed copy of it, or prompt-lookup"
    )


def _prompts(checkpoint: Checkpoint, settings: Settings) -> Tensor:
    """Return token ids, int64 `[prompts, tokens]`, from --prompt-text or the shipped text. Raises
    QuantkitError if the text cannot be read or is too short."""
    options = CalibrationOptions(
        calibration=str(settings.prompt_text) if settings.prompt_text else None,
        text_column=settings.text_column,
        samples=settings.prompts,
        seqlen=settings.prompt_tokens,
        seed=settings.seed,
    )
    return calibration.load(checkpoint, options).tokens
