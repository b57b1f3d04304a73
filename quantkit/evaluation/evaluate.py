"""Perplexity and divergence of checkpoints, streamed block by block: no whole model is in memory.

All evaluation tokens advance through a model one block at a time, so memory does not grow with depth.
The base model's final hidden states are kept. They are smaller than its logits, which are computed from them
for some tokens at a time. So the KL divergence is exact and no logits are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.evaluation import kv_rounding, memory
from quantkit.evaluation.engines import Declined, Engine
from quantkit.evaluation.kv_cache import Kv
from quantkit.evaluation.metrics import SELECTABLE, Metrics, summarize
from quantkit.evaluation.scoring import Floor, Measured, batch_size, measure_floor, run, score
from quantkit.evaluation.served import InEngine, in_engine
from quantkit.evaluation.stream import Listener, StreamedModel
from quantkit.evaluation.tasks import Tasks, TaskScores
from quantkit.evaluation.trial import Trial
from quantkit.evaluation.windows import Windows, check_context
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf.tokenizer_hash import difference, tokenizer_sha256
from quantkit.models.machine import distributed
from quantkit.models.machine.memory import map_large_blocks
from quantkit.models.skeleton import Skeleton


@dataclass(frozen=True)
class Size:
    """The size of a model. weight_bytes: all tensors. disk_bytes: all files of the folder. bits_per_weight:
    mean over the whole model. bits_per_quantized_weight: mean over quantized weights, scales and zero points
    included; None if no weight is quantized."""

    disk_bytes: int
    weight_bytes: int
    bits_per_weight: float
    bits_per_quantized_weight: float | None


@dataclass(frozen=True)
class Result:
    """One model of a comparison. tasks: {task: {metric: {value, stderr}}}, None if no tasks were run. kv: the
    quantized KV cache, None if the cache was not quantized. weights_only: activations were not quantized,
    although clients of the layout do it. engine: None if quantkit computed the logits."""

    source: str
    size: Size
    metrics: Metrics
    tasks: TaskScores | None = None
    kv: Kv | None = None
    weights_only: bool = False
    engine: InEngine | None = None


@dataclass(frozen=True)
class Evaluation:
    """Results in the given order, the base first. floor: None if not requested. noise: the base in the
    engine, None without an engine or if it declined the base; declined: why."""

    results: list[Result]
    floor: Floor | None
    noise: Result | None = None
    declined: str | None = None


def evaluate(
    checkpoints: Sequence[Checkpoint], windows: Windows, dtype: torch.dtype, device: torch.device,
    listen: Listener = lambda source, done, total: None, trials: Sequence[str] = (),
    chosen: frozenset[str] = frozenset(SELECTABLE), tasks: Tasks | None = None, kv_dtypes: Sequence[str] = (),
    weights_only: bool = False, max_memory: int | None = None, engine: Engine | None = None,
) -> Evaluation:  # fmt: skip
    """Measure every checkpoint and its divergence from the first one, the base.

    trials: data-free methods, as typed; the base is also measured after each. chosen: names of metrics.
    tasks: run on every model. kv_dtypes: every model is also measured with its KV cache in these types.
    weights_only: models whose clients quantize activations are also measured without that. max_memory: bytes
    for the whole process; hidden states that do not fit are stored in a file. engine: runs every model a
    second time.

    Raises QuantkitError if a candidate's tokenizer or vocabulary differs from the first's, if the engine
    declines a candidate, and (exit code 5), before reading weights, if an evaluation does not fit the memory.
    """
    single = not engine or distributed.count() == 1
    require(single, "--engine runs in a single process", "start quantkit without torchrun", USAGE)
    check_comparable(checkpoints)
    for name in kv_dtypes:
        kv_rounding.named(name)
    for checkpoint in checkpoints:
        check_context(checkpoint, windows.protocol.ctx)
    map_large_blocks()
    models: list[tuple[Checkpoint, Trial | None]] = [(checkpoint, None) for checkpoint in checkpoints]
    models += [(checkpoints[0], Trial.prepare(name, checkpoints[0])) for name in trials]
    candidates = [
        (*model, kv, alone) for model in models for kv in (None, *kv_dtypes)
        for alone in _halves(*model, weights_only and kv is None)
    ]  # fmt: skip
    windows, whole = windows.shared(batch_size(windows)), windows
    batch = min(batch_size(windows), len(windows.ids)) * windows.ids.shape[1]
    planned = checkpoints, dtype, device, windows.ids.numel(), batch, len(candidates) > 1, max_memory
    storage = memory.decide(*planned)
    results, base, base_scores, floor, noise, declined = [], None, None, None, None, None
    for checkpoint, trial, kv, alone in candidates:
        model = StreamedModel.open(checkpoint, dtype, device, trial, kv, alone)
        measured = Measured(model, run(model, windows, listen, storage))
        scores = score(measured.logits, windows, model.chunk_tokens, base, chosen).of_all_ranks()
        metrics = summarize(scores, base_scores, chosen)
        scored = distributed.broadcast(partial(tasks.measure, model, listen)) if tasks else None
        size = _size(model.skeleton, trial)
        results.append(Result(model.name, size, metrics, scored, model.kv, alone))
        if base is None:
            base, base_scores = measured, scores
            if "floor" in chosen and len(candidates) > 1:
                floor = distributed.broadcast(partial(measure_floor, base, scores, whole, chosen, listen))
        if engine and not (trial or kv or alone):
            try:
                scores, facts = in_engine(engine, measured, windows, base, chosen, listen)
            except Declined as error:
                if measured is not base or len(checkpoints) == 1:
                    raise
                declined = error.message  # the candidates are measured all the same
                continue
            name, metrics = f"{model.name} in {engine.name}", summarize(scores, base_scores, chosen)
            result = Result(name, size, metrics, engine=facts)
            if measured is base:
                noise = result
            else:
                results.append(result)
    return Evaluation(results, floor, noise, declined)


def _halves(checkpoint: Checkpoint, trial: Trial | None, both: bool) -> tuple[bool, ...]:
    """Return the values of `weights_only` to measure; (False, True) only if clients quantize activations."""
    layout = trial.method.layout if trial else checkpoint.layout
    return (False, True) if both and layout is not None and layout.rounds_inputs else (False,)


def check_comparable(
    checkpoints: Sequence[Checkpoint], hint: str = "other tokens cannot be compared: evaluate them one by one"
) -> None:
    """Raise QuantkitError if tokenizers or vocabulary sizes of the checkpoints differ."""
    first, *others = checkpoints
    reference = tokenizer_sha256(first.tokenizer, first.text_config.vocab_size) if others else None
    for other in others:
        sizes = first.text_config.vocab_size, other.text_config.vocab_size
        what = f"{first.source} predicts {sizes[0]} tokens, {other.source} {sizes[1]}"
        require(sizes[0] == sizes[1], what, hint, UNSUPPORTED)
        if tokenizer_sha256(other.tokenizer, sizes[1]) != reference:
            why = difference(first.tokenizer, other.tokenizer, sizes)
            what = f"{other.source} and {first.source} have different tokenizers: {why}"
            raise QuantkitError(what, hint, UNSUPPORTED)


def _size(skeleton: Skeleton, trial: Trial | None) -> Size:
    checkpoint = skeleton.checkpoint
    weight_bytes = sum(info.nbytes for info in checkpoint.infos.values())
    disk_bytes = checkpoint.disk_bytes
    if trial:  # sizes of the tensors that would be written
        sizes = trial.sizes(checkpoint)
        packed_bytes, packed = sizes.quantized, sizes.weights
        disk_bytes, weight_bytes = disk_bytes + sizes.total - weight_bytes, sizes.total
    else:
        coded = checkpoint.coded_bytes()
        counts = {skeleton.names.stored[name]: p.numel() for name, p in skeleton.stored_parameters().items()}
        names = coded.keys() & counts.keys()
        packed_bytes, packed = sum(coded[name] for name in names), sum(counts[name] for name in names)
    modules = (skeleton.model, *skeleton.blocks, *skeleton.towers.values())
    count = sum(p.numel() for module in modules for p in module.parameters())
    return Size(
        disk_bytes=disk_bytes,
        weight_bytes=weight_bytes,
        bits_per_weight=8 * weight_bytes / count,
        bits_per_quantized_weight=8 * packed_bytes / packed if packed else None,
    )
