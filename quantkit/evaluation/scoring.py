"""Scores every token of a text by a model's logits: they are computed from hidden states for some tokens at a
time, and never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.evaluation.metrics import Metrics, Scores, summarize
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.evaluation.windows import Windows
from quantkit.models.files.open import watched
from quantkit.quantize.calibrate import divergence
from quantkit.quantize.calibrate.states import HERE, Place, States
from quantkit.quantize.prepare.memory import BATCH_TOKENS
from quantkit.quantize.staging.folder import disk_errors

Logits = Callable[[int, tuple[int, slice]], Tensor]  # of (batch, (row, positions)): `[tokens, vocabulary]`
FLOOR_TOKENS = 1024  # for the noise floor: a CPU without bfloat16 takes eight times as long


@dataclass(frozen=True)
class Measured:
    """A model that has run, and its final hidden states."""

    model: StreamedModel
    states: States

    def logits(self, batch: int, span: tuple[int, slice]) -> Tensor:
        return self.model.skeleton.logits(self.states[batch][span])


@dataclass(frozen=True)
class Floor:
    """The noise floor: the base compared with itself in another dtype, over the first `tokens` tokens."""

    dtype: torch.dtype
    tokens: int
    metrics: Metrics


def run(model: StreamedModel, windows: Windows, listen: Listener, storage: Place = HERE) -> States:
    """Run the model over all windows; return final hidden states `[batch, ctx, hidden]` of each batch."""
    full = disk_errors(storage.folder, "run the same command again, with another folder in TMPDIR")
    with watched(model.skeleton.checkpoint), full if storage.folder else nullcontext():
        return model.states(windows.ids.split(batch_size(windows)), listen, storage)


def batch_size(windows: Windows) -> int:
    """Return the number of windows in a batch."""
    return max(1, BATCH_TOKENS // windows.ids.shape[1])


def measure_floor(
    base: Measured, scores: Scores, windows: Windows, chosen: frozenset[str], listen: Listener,
    dtype: torch.dtype | None = None,
) -> Floor:  # fmt: skip
    """Return the divergence of the base from itself in another dtype: by default bfloat16 for a float32 base,
    else float32.

    It shows the effect of arithmetic alone: a smaller divergence of a candidate has no meaning.
    """
    skeleton = base.model.skeleton
    dtype = dtype or (torch.bfloat16 if skeleton.dtype == torch.float32 else torch.float32)
    ctx = windows.ids.shape[1]
    count = min(len(windows.ids), max(1, FLOOR_TOKENS // ctx))
    tokens = sum(ctx - 1 - first for first in windows.first[:count])
    head = Windows(windows.ids[:count], windows.first[:count], replace(windows.protocol, tokens=tokens))
    model = StreamedModel.open(skeleton.checkpoint, dtype, skeleton.device)
    model = replace(model, name=f"{model.name} in {str(dtype).removeprefix('torch.')}")
    other = Measured(model, run(model, head, listen))
    others = score(other.logits, head, model.chunk_tokens, base, chosen)
    metrics = summarize(others, Scores(scores.nll[:tokens]), chosen)
    return Floor(dtype, tokens, metrics)


def score(
    logits_of: Logits, windows: Windows, size: int, base: Measured | None, chosen: frozenset[str],
    decoded: Measured | None = None,
) -> Scores:  # fmt: skip
    """Return the scores of all scored tokens, from the logits of `size` tokens at a time. base: model to
    compare with; None for the base itself. decoded: the same model as quantkit decodes it, for the logits of
    an engine."""
    nll, kld, agree, difference = [], [], [], []
    compared = base is not None and bool(chosen & {"kld", "top1"})
    for batch, span, targets in _chunks(windows, size):
        logits = logits_of(batch, span)
        nll.append(divergence.nll(logits, targets.to(logits.device)).cpu())
        if compared:
            expected = base.logits(batch, span)
            for scores, values in zip((kld, agree), divergence.of_logits(expected, logits), strict=True):
                scores.append(values.cpu())
        if decoded:
            difference.append(divergence.of_logits(decoded.logits(batch, span), logits)[0].cpu())
    return Scores(
        torch.cat(nll),
        torch.cat(kld) if compared and "kld" in chosen else None,
        torch.cat(agree).bool() if compared and "top1" in chosen else None,
        torch.cat(difference) if decoded else None,
    )


def _chunks(windows: Windows, size: int) -> Iterator[tuple[int, tuple[int, slice], Tensor]]:
    """Yield (batch, (row, positions), target ids), at most `size` scored positions at a time."""
    last = windows.ids.shape[1] - 1
    for window, ids in enumerate(windows.ids):
        batch, row = divmod(window, batch_size(windows))
        for start in range(windows.first[window], last, size):
            end = min(start + size, last)
            yield batch, (row, slice(start, end)), ids[start + 1 : end + 1]
