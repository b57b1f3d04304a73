"""Perplexity and divergence of checkpoints, streamed block by block: no whole model is in memory.

All evaluation tokens advance through a model one block at a time, so memory does not grow with depth.
The base model's final hidden states are kept. They are smaller than its logits, which are computed from them
for some tokens at a time. So the KL divergence is exact and no logits are stored.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from filecmp import cmp
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, USAGE, VERIFICATION, QuantkitError, name_all, require
from quantkit.evaluation import kv_cache, memory, metrics
from quantkit.evaluation.engines import Declined, Engine, Logits
from quantkit.evaluation.metrics import SELECTABLE, Scores, summarize
from quantkit.evaluation.stream import Listener, StreamedModel, Trial
from quantkit.evaluation.tasks import Tasks
from quantkit.evaluation.windows import Windows, check_context
from quantkit.models import kv_types
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import watched
from quantkit.models.gguf.tokenizer_hash import difference, tokenizer_sha256
from quantkit.models.machine import distributed
from quantkit.models.machine.device import bfloat16_linears, give_back
from quantkit.models.machine.memory import map_large_blocks
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import divergence
from quantkit.quantize.calibrate.states import HERE, Place, States
from quantkit.quantize.prepare.memory import BATCH_TOKENS
from quantkit.quantize.staging.folder import disk_errors

FLOOR_TOKENS = 1024  # for the noise floor


@dataclass(frozen=True)
class Measured:
    """A model that has run. states: final hidden states `[batch, ctx, hidden]` of each batch."""

    model: StreamedModel
    states: States

    def logits(self, batch: int, span: tuple[int, slice]) -> Tensor:
        skeleton = self.model.skeleton
        with bfloat16_linears(skeleton.dtype, skeleton.device):
            return skeleton.logits(self.states[batch][span])


def evaluate(
    checkpoints: Sequence[Checkpoint], windows: Windows, dtype: torch.dtype, device: torch.device,
    listen: Listener = lambda source, done, total: None, trials: Sequence[str] = (),
    chosen: frozenset[str] = frozenset(SELECTABLE), tasks: Tasks | None = None, kv_dtypes: Sequence[str] = (),
    weights_only: bool = False, max_memory: str | None = None, engine: Engine | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure every checkpoint and its divergence from the first one, the base. Return the keys
    `models`, `noise_floor` and `engine_declined` of eval-3.json, with NaN and infinity.

    trials: data-free methods, as typed; the base is also measured after each. chosen: names of metrics.
    tasks: run on every model. kv_dtypes: every model is also measured with its KV cache in these types.
    weights_only: models whose clients quantize activations are also measured without that. max_memory: of
    the whole process, such as `6GB`; hidden states that do not fit are stored in a file. engine: runs every
    model a second time.

    Raises QuantkitError if a candidate's tokenizer or vocabulary differs from the first's, if the engine
    declines the only model or fails on the base, and (exit code 5), before reading weights, if an evaluation
    does not fit the memory.
    """
    single = not engine or distributed.count() == 1
    require(single, "--engine runs in a single process", "start quantkit without torchrun", USAGE)
    check_comparable(checkpoints)
    for name in kv_dtypes:
        kv_cache.rounding_of(name)
        odd = [each.source for each in checkpoints if not kv_types.fits(each.text_config, name)]
        needs = f"a {name} cache needs heads whose width is a multiple of {kv_types.BLOCK}"
        require(not odd, f"{needs}, unlike those of {name_all(odd)}", "choose fp8 or a float", UNSUPPORTED)
    for checkpoint in checkpoints:
        check_context(checkpoint, windows.protocol.ctx)
    map_large_blocks()
    candidates = _candidates(checkpoints, trials, kv_dtypes, weights_only)
    windows, whole = windows.shared(_batch(windows)), windows
    batch = min(_batch(windows), len(windows.ids)) * windows.ids.shape[1]
    planned = checkpoints, dtype, device, windows.ids.numel(), batch, len(candidates) > 1, max_memory
    storage = memory.decide(*planned)
    models, base, base_scores, floor, declined = [], None, None, None, {}
    for checkpoint, trial, kv, alone in candidates:
        model = StreamedModel.open(checkpoint, dtype, device, trial, kv, alone)
        measured = run(model, windows, listen, storage)
        scores = _score(measured.logits, windows, model.chunk_tokens, base, chosen).of_all_ranks()
        models.append({
            "source": model.name,
            "size": _size(model.skeleton, trial),
            "metrics": summarize(scores, base_scores, chosen),
            "tasks": distributed.broadcast(partial(tasks.measure, model, listen)) if tasks else None,
            "kv": model.kv,
            "weights_only": alone,
            "engine": None,
        })  # fmt: skip
        if base is None:
            base, base_scores = measured, scores
            if "floor" in chosen and len(candidates) > 1:
                floor = distributed.broadcast(partial(measure_floor, base, scores, whole, chosen, listen))
        if engine and not (trial or kv or alone):
            try:
                scores, facts = in_engine(engine, measured, windows, base, chosen, listen)
            except Declined as error:
                if len(checkpoints) == 1 or (measured is base and error.exit_code != UNSUPPORTED):
                    raise
                declined[model.name] = error.record()["error"]  # the others are measured all the same
            else:
                served = {"source": f"{model.name} in {engine.name}", "tasks": None, "kv": None}
                served |= {"metrics": summarize(scores, base_scores, chosen), "engine": facts}
                models.append(models[-1] | served)
    return {"models": models, "noise_floor": floor, "engine_declined": declined}


def in_engine(
    engine: Engine, decoded: Measured, windows: Windows, base: Measured | None, chosen: frozenset[str],
    listen: Listener,
) -> tuple[Scores, dict[str, Any]]:  # fmt: skip
    """Return the scores of a model whose logits the engine computes, and {name, version, kernels, dtype,
    difference}: the KL divergence from `decoded`, the same model as quantkit decodes it. Raises Declined if
    the engine does not run the model, or computes NaN."""
    skeleton, name = decoded.model.skeleton, f"{decoded.model.name} in {engine.name}"
    listen(name, 0, 1)
    give_back(skeleton.device)  # the engine's process needs it
    with engine.run(skeleton.checkpoint, windows, skeleton.device) as (said, logits):
        scores = _score(logits, windows, decoded.model.chunk_tokens, base, chosen, decoded)
    listen(name, 1, 1)
    if not scores.difference.isfinite().all():
        what = f"{engine.name} computes probabilities of {decoded.model.name} that are not finite numbers"
        raise Declined(what, "quantkit inspect lists the engines that load the model", VERIFICATION)
    return scores, {"name": engine.name, **said, "difference": metrics.divergence(scores.difference)}


def _candidates(
    checkpoints: Sequence[Checkpoint], trials: Sequence[str], kv_dtypes: Sequence[str], weights_only: bool
) -> list[tuple[Checkpoint, Trial | None, str | None, bool]]:
    """Return all models to measure: (checkpoint, trial, type of the KV cache, without quantized activations).
    weights_only: also without these, if clients quantize activations."""
    pairs: list[tuple[Checkpoint, Trial | None]] = [(checkpoint, None) for checkpoint in checkpoints]
    pairs += [(checkpoints[0], Trial.prepare(name, checkpoints[0])) for name in trials]
    candidates = []
    for checkpoint, trial in pairs:
        layout = trial.method.layout if trial else checkpoint.layout
        candidates.append((checkpoint, trial, None, False))
        if weights_only and layout is not None and layout.rounds_inputs:
            candidates.append((checkpoint, trial, None, True))
        candidates += [(checkpoint, trial, kv, False) for kv in kv_dtypes]
    return candidates


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
        if not _same_files(first, other) and tokenizer_sha256(other.tokenizer, sizes[1]) != reference:
            why = difference(first.tokenizer, other.tokenizer, sizes)
            what = f"{other.source} and {first.source} have different tokenizers: {why}"
            raise QuantkitError(what, hint, UNSUPPORTED)


def _same_files(first: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two folders of one kind of model store their tokenizers in the same bytes. Loading a
    tokenizer of 262,144 tokens takes 5 seconds and 0.35 GB."""
    if first.text_config.model_type != other.text_config.model_type:
        return False
    names = ("tokenizer.json", "tokenizer_config.json")
    pairs = [(first.folder / name, other.folder / name) for name in names]
    return all(one.is_file() and two.is_file() and cmp(one, two, shallow=False) for one, two in pairs)


def run(model: StreamedModel, windows: Windows, listen: Listener, storage: Place = HERE) -> Measured:
    """Run the model over all windows."""
    skeleton, hint = model.skeleton, "run the same command again, with another folder in TMPDIR"
    full = disk_errors(storage.folder, hint) if storage.folder else nullcontext()
    with watched(skeleton.checkpoint), bfloat16_linears(skeleton.dtype, skeleton.device), full:
        return Measured(model, model.states(windows.ids.split(_batch(windows)), listen, storage))


def _batch(windows: Windows) -> int:
    """Return the number of windows in a batch."""
    return max(1, BATCH_TOKENS // windows.ids.shape[1])


def measure_floor(
    base: Measured, scores: Scores, windows: Windows, chosen: frozenset[str], listen: Listener,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return {dtype, tokens, metrics}: the divergence of the base from itself in another dtype, by default
    bfloat16 for a float32 base, else float32.

    It shows the effect of arithmetic alone: a smaller divergence of a candidate has no meaning.
    """
    skeleton = base.model.skeleton
    dtype = dtype or (torch.bfloat16 if skeleton.dtype == torch.float32 else torch.float32)
    ctx = windows.ids.shape[1]
    count = min(len(windows.ids), max(1, FLOOR_TOKENS // ctx))
    tokens = sum(ctx - 1 - first for first in windows.first[:count])
    head = Windows(windows.ids[:count], windows.first[:count], replace(windows.protocol, tokens=tokens))
    model = StreamedModel.open(skeleton.checkpoint, dtype, skeleton.device)
    name = str(dtype).removeprefix("torch.")
    model = replace(model, name=f"{model.name} in {name}")
    other = run(model, head, listen)
    others = _score(other.logits, head, model.chunk_tokens, base, chosen)
    return {
        "dtype": name,
        "tokens": tokens,
        "metrics": summarize(others, Scores(scores.nll[:tokens]), chosen),
    }


def _score(
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
        batch, row = divmod(window, _batch(windows))
        for start in range(windows.first[window], last, size):
            end = min(start + size, last)
            yield batch, (row, slice(start, end)), ids[start + 1 : end + 1]


def _size(skeleton: Skeleton, trial: Trial | None) -> dict[str, float | None]:
    """Return the bytes of all files of the folder and of all tensors, and the mean bits of all weights and of
    quantized weights, scales included (None if no weight is quantized)."""
    checkpoint = skeleton.checkpoint
    weight_bytes = sum(info.nbytes for info in checkpoint.infos.values())
    disk_bytes = checkpoint.disk_bytes
    if trial:  # sizes of the tensors that would be written
        method = trial.method
        sizes = method.output.sizes(checkpoint, trial.specs, method.layout)
        packed_bytes, packed = sizes.quantized, sizes.weights
        disk_bytes, weight_bytes = disk_bytes + sizes.total - weight_bytes, sizes.total
    else:
        coded = checkpoint.coded_bytes()
        counts = {skeleton.names.stored[name]: p.numel() for name, p in skeleton.stored_parameters().items()}
        names = coded.keys() & counts.keys()
        packed_bytes, packed = sum(coded[name] for name in names), sum(counts[name] for name in names)
    modules = (skeleton.model, *skeleton.blocks, *skeleton.towers.values())
    count = sum(p.numel() for module in modules for p in module.parameters())
    return {
        "disk_bytes": disk_bytes,
        "weight_bytes": weight_bytes,
        "bits_per_weight": 8 * weight_bytes / count,
        "bits_per_quantized_weight": 8 * packed_bytes / packed if packed else None,
    }
