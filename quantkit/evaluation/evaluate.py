"""Perplexity and divergence of checkpoints, streamed block by block: no model is ever held whole.

All evaluation tokens advance through a model one block at a time, so memory does not grow with depth.
The base model's final hidden states are kept (hidden-size, not vocabulary-size); logits of base and
candidate are formed chunk by chunk from them, so the KL divergence is exact and no logit file exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.evaluation.comparable import check_comparable
from quantkit.evaluation.layer_errors import LayerErrors, read_layer_errors
from quantkit.evaluation.metrics import SELECTABLE, Metrics, Scores, summarize
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.evaluation.tasks import Tasks, TaskScores
from quantkit.evaluation.trial import Trial
from quantkit.evaluation.windows import Windows, check_context
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.heap import map_large_blocks
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.memory import BATCH_TOKENS
from quantkit.quantize.states import States

FLOOR_TOKENS = 1024  # of the noise floor: a CPU without bfloat16 takes eight times as long for each


@dataclass(frozen=True)
class Size:
    """weight_bytes: all tensors; disk_bytes: all files of the folder; bits over the whole model, and over
    the weights that are stored quantized (scales and the like included), None where none is."""

    disk_bytes: int
    weight_bytes: int
    bits_per_weight: float
    bits_per_quantized_weight: float | None


@dataclass(frozen=True)
class Result:
    """One model of a comparison. layers: what its maker recorded about each linear, where that is known.

    tasks: task -> metric -> value and standard error; None where none were run.
    """

    source: str
    size: Size
    metrics: Metrics
    layers: LayerErrors | None
    tasks: TaskScores | None = None


@dataclass(frozen=True)
class Floor:
    """The noise floor: the base against itself in another precision, over its first `tokens` tokens."""

    dtype: torch.dtype
    tokens: int
    metrics: Metrics


@dataclass(frozen=True)
class Evaluation:
    """Results in the order asked for, the base first. floor: None where it was not asked for."""

    results: list[Result]
    floor: Floor | None


@dataclass(frozen=True)
class _Measured:
    """A model that has run: final hidden states `[batch, ctx, hidden]`, a batch of windows each."""

    model: StreamedModel
    states: States

    def log_probs(self, chunk: _Chunk) -> Tensor:
        return self.model.log_probs(chunk.pick(self.states))


def evaluate(
    checkpoints: Sequence[Checkpoint], windows: Windows, dtype: torch.dtype, device: torch.device,
    listen: Listener = lambda source, done, total: None, trials: Sequence[str] = (),
    chosen: frozenset[str] = frozenset(SELECTABLE), tasks: Tasks | None = None,
) -> Evaluation:  # fmt: skip
    """Metrics of every checkpoint and its divergence from the first; then those of the first as data-free
    methods (`trials`) would leave it. chosen: of `metrics.SELECTABLE`. tasks: run on every model as well.

    Raises QuantkitError when a candidate's tokenizer or vocabulary differs from the first's.
    """
    check_comparable(checkpoints)
    for checkpoint in checkpoints:
        check_context(checkpoint, windows.protocol.ctx)
    map_large_blocks()
    candidates: list[tuple[Checkpoint, Trial | None]] = [(checkpoint, None) for checkpoint in checkpoints]
    candidates += [(checkpoints[0], Trial.prepare(name, checkpoints[0])) for name in trials]
    recorded = [None if trial else read_layer_errors(checkpoint) for checkpoint, trial in candidates]
    context = _context(windows)
    results, base, base_scores, floor = [], None, None, None
    for (checkpoint, trial), layers in zip(candidates, recorded, strict=True):
        model = StreamedModel.open(checkpoint, dtype, device, trial)
        measured = _run(model, windows, listen)
        scores = _score(measured, windows, base, chosen)
        metrics = summarize(scores, base_scores, context, chosen)
        layers = LayerErrors("weight", model.errors) if trial else layers
        scored = tasks.measure(model, listen) if tasks else None
        results.append(Result(model.name, _size(checkpoint, model.skeleton, trial), metrics, layers, scored))
        if base is None:
            base, base_scores = measured, scores
            if "floor" in chosen and len(candidates) > 1:
                floor = _measure_floor(base, base_scores, windows, chosen, listen)
    return Evaluation(results, floor)


def _run(model: StreamedModel, windows: Windows, listen: Listener) -> _Measured:
    """All windows through all blocks."""
    batch = max(1, BATCH_TOKENS // windows.ids.shape[1])
    return _Measured(model, model.states(windows.ids.split(batch), listen))


def _measure_floor(
    base: _Measured, scores: Scores, windows: Windows, chosen: frozenset[str], listen: Listener
) -> Floor:
    """The base again, its first windows, in bfloat16, or in float32 where 16 bit was asked for.

    That is what arithmetic alone changes: a candidate that differs less from the base than this cannot be
    told from the base as it is served.
    """
    skeleton = base.model.skeleton
    dtype = torch.bfloat16 if skeleton.dtype == torch.float32 else torch.float32
    ctx = windows.ids.shape[1]
    count = min(len(windows.ids), max(1, FLOOR_TOKENS // ctx))
    tokens = sum(ctx - 1 - first for first in windows.first[:count])
    head = Windows(windows.ids[:count], windows.first[:count], replace(windows.protocol, tokens=tokens))
    model = StreamedModel.open(skeleton.checkpoint, dtype, skeleton.device)
    model = replace(model, name=f"{model.name} in {str(dtype).removeprefix('torch.')}")
    others = _score(_run(model, head, listen), head, base, chosen)
    metrics = summarize(others, Scores(scores.nll[:tokens]), _context(head), chosen)
    return Floor(dtype, tokens, metrics)


def _score(measured: _Measured, windows: Windows, base: _Measured | None, chosen: frozenset[str]) -> Scores:
    """Every scored token, chunk by chunk."""
    nll, kld, agree = [], [], []
    compared = base is not None and bool(chosen & {"kld", "top1"})
    for chunk in _chunks(measured.states, windows, measured.model.chunk_tokens):
        log_probs = measured.log_probs(chunk)
        targets = chunk.targets.to(log_probs.device)
        nll.append(-log_probs.gather(1, targets[:, None])[:, 0].cpu())
        if compared:
            expected = base.log_probs(chunk)
            agree.append((expected.argmax(-1) == log_probs.argmax(-1)).cpu())
            apart = (expected - log_probs).mul_(expected.exp_())
            kld.append(apart.sum(-1).cpu())
    return Scores(
        torch.cat(nll),
        torch.cat(kld) if compared and "kld" in chosen else None,
        torch.cat(agree) if compared and "top1" in chosen else None,
    )


def _context(windows: Windows) -> Tensor:
    """How many tokens of its window each scored token was given, int64 `[tokens]`."""
    last = windows.ids.shape[1] - 1
    return torch.cat([torch.arange(first, last) + 1 for first in windows.first])


@dataclass(frozen=True)
class _Chunk:
    """Scored positions `start:end` of one window: hidden states there predict `targets`."""

    batch: int
    row: int
    start: int
    end: int
    targets: Tensor

    def pick(self, states: States) -> Tensor:
        return states[self.batch][self.row, self.start : self.end]


def _chunks(states: States, windows: Windows, size: int) -> Iterator[_Chunk]:
    window = 0
    for batch, hidden in enumerate(states):
        for row in range(len(hidden)):
            ids, last = windows.ids[window], windows.ids.shape[1] - 1
            for start in range(windows.first[window], last, size):
                end = min(start + size, last)
                yield _Chunk(batch, row, start, end, ids[start + 1 : end + 1])
            window += 1


def _size(checkpoint: Checkpoint, skeleton: Skeleton, trial: Trial | None) -> Size:
    weight_bytes = sum(info.nbytes for info in checkpoint.infos.values())
    disk_bytes = checkpoint.disk_bytes
    if trial:  # what would be written
        packed_bytes, packed = trial.packed()
        written = trial.weight_bytes(checkpoint)
        disk_bytes, weight_bytes = disk_bytes + written - weight_bytes, written
    else:
        coded, counts = checkpoint.coded_bytes(), dict(skeleton.counts())
        names = coded.keys() & counts.keys()
        packed_bytes, packed = sum(coded[name] for name in names), sum(counts[name] for name in names)
    parameters = {id(p): p.numel() for p in skeleton.model.parameters()}
    count = sum(parameters.values()) + sum(p.numel() for b in skeleton.blocks for p in b.parameters())
    return Size(
        disk_bytes=disk_bytes,
        weight_bytes=weight_bytes,
        bits_per_weight=8 * weight_bytes / count,
        bits_per_quantized_weight=8 * packed_bytes / packed if packed else None,
    )
