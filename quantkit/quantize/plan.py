"""The job before it runs: what it takes in memory and disk, decided and checked on shapes alone."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import RESOURCES, USAGE, QuantkitError, count
from quantkit.layouts import LinearSpec
from quantkit.models import ranks
from quantkit.models.device import free_memory, host_memory, is_accelerator
from quantkit.models.held import ROUTED
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.streaming import streamed
from quantkit.options import RunOptions
from quantkit.quantize.memory import (
    BATCH_TOKENS,
    COMFORT,
    FLOAT32,
    PART,
    Peak,
    Shapes,
    peak_memory,
    scratch_bytes,
    sites_at_once,
)
from quantkit.quantize.methods import Method

GIB = 1 << 30
ENCODING = 1 << 24  # temporaries of an encoder


@dataclass(frozen=True)
class Execution:
    """How the job runs; all fields but the last two decide bytes of the output and stand in the fingerprint.

    states: `device` or `host`, where the hidden states of the calibration tokens are kept. at_once: sites of
    a layer's experts whose statistics a repeated forward gathers in one pass.
    """

    dtype: str
    device: str
    batch_size: int
    sequential: str
    threads: int
    states: str = "device"
    at_once: int = 1

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def decisive(self) -> dict:
        """What the bytes of the output depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("states", "at_once")}


@dataclass(frozen=True)
class JobPlan:
    """Predicted peaks in bytes, of each rank, and the size of the output. memory_bytes: where it computes;
    host_bytes: on the host, which is the same place for a CPU, above what the interpreter itself takes."""

    execution: Execution
    memory_bytes: int
    host_bytes: int
    disk_bytes: int
    output_bytes: int
    source_bytes: int
    bits_per_weight: float
    ranks: int = 1


def decide(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    options: RunOptions,
    shape: tuple[int, int],
    kept: dict,
) -> tuple[Execution, Peak]:
    """How the job runs on calibration tokens of `shape`, and the peak memory it needs for that.

    `kept` is the execution of the job being resumed, or empty: where the user says nothing, it stays.
    Of the ways that are left, the fastest that fits the memory well; raises QuantkitError (exit code 5) when
    not even the most frugal fits at all.
    """
    batch_size = sequences_at_once(options.batch_size or kept.get("batch_size"), shape)
    batches, seqlen = -(-shape[0] // batch_size), shape[1]
    samples = min(shape[0], batch_size * -(-batches // ranks.count()))  # of one rank, at most

    def need(mode: str, states: str, batch_size: int = batch_size, at_once: int = 1) -> Peak:
        batch_tokens = min(batch_size, samples) * seqlen
        return _memory(skeleton, specs, method, samples * seqlen, batch_tokens, mode, states, at_once)

    sequential = options.sequential if options.sequential != "auto" else kept.get("sequential")
    accelerated = is_accelerator(skeleton.device)
    places = ["device", "host"] if options.states == "auto" else [options.states]
    ways = [
        (mode, states)
        for mode in ([sequential] if sequential else _modes(skeleton))
        for states in (places if accelerated else ["device"])
    ]
    free = ranks.least(free_memory(skeleton.device))
    mode, states = next((way for way in ways if need(*way).computing < COMFORT * free), ways[-1])
    peak, at_once = need(mode, states), 1
    if mode == "repeat" and "hessian" in method.needs:
        at_once = sites_at_once(_shapes(skeleton, specs, samples * seqlen, 0), free, peak.computing)
        peak = need(mode, states, at_once=at_once)
    if peak.computing > free:
        smaller = (size for k in range(1, 12) if (size := batch_size >> k) >= 1)
        fits = next((size for size in smaller if need("repeat", places[-1], size).computing <= free), None)
        remedy = "fewer --samples, shorter --seqlen, a smaller --batch-size or --sequential repeat"
        if fits:
            remedy = f"--batch-size {fits} --sequential repeat" + " --states host" * accelerated
        check_memory(peak.computing, free, remedy, skeleton.device)
    if accelerated:
        check_memory(peak.host, ranks.least(host_memory()), "fewer --samples or shorter --seqlen")
    dtype = str(skeleton.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    return Execution(dtype, str(skeleton.device), batch_size, mode, threads, states, at_once), peak


def _modes(skeleton: Skeleton) -> list[str]:
    """The fastest first. Several ranks solve an expert each where none has to wait for those before it."""
    return ["repeat"] if skeleton.is_mixture and ranks.count() > 1 else ["suspend", "repeat"]


def frugal(execution: Execution) -> Execution | None:
    """The way of running that takes the least memory for the same bytes; None where that is this one."""
    least = replace(execution, sequential="repeat", states="host", at_once=1)
    return least if least != execution else None


def out_of_memory(execution: Execution, block: int) -> QuantkitError:
    """What to tell when the device ran out of memory in a block, and what takes less."""
    message = f"{execution.device} ran out of memory in block {block + 1}"
    if frugal(execution):  # it went too far to begin the block again
        hint = "finished blocks are kept: run the same command with --resume --states host"
        return QuantkitError(message, hint, RESOURCES)
    less = f"--batch-size {execution.batch_size // 2}" if execution.batch_size > 1 else "a shorter --seqlen"
    return QuantkitError(
        message,
        hint=f"start again with {less} --sequential {execution.sequential} --overwrite",
        exit_code=RESOURCES,
    )


def default_batch_size(seqlen: int) -> int:
    """Sequences per forward pass, where the user does not say."""
    return max(1, BATCH_TOKENS // seqlen)


def sequences_at_once(asked: int | None, shape: tuple[int, int]) -> int:
    """Sequences per forward pass over tokens of `shape`; where the user does not say, so few that every rank
    has some.

    Raises QuantkitError where ranks would be left without.
    """
    samples, seqlen = shape
    size = asked or min(default_batch_size(seqlen), max(1, samples // ranks.count()))
    if -(-samples // size) < ranks.count():
        raise QuantkitError(
            f"{count(samples, 'calibration sequence')} in batches of {size} are fewer batches than the "
            f"{ranks.count()} processes",
            "start fewer processes, or use a smaller --batch-size or more --samples",
            USAGE,
        )
    return size


def own_batches(tokens: Tensor, size: int) -> list[Tensor]:
    """This rank's of the batches that `tokens [samples, seqlen]` are cut into, so many sequences each."""
    return list(ranks.share(tokens.split(size)))


def check_memory(need: int, free: int, remedy: str, device: torch.device | None = None) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes are free, on the host or on `device`."""
    if need > free:
        where = f" on {device}" if device is not None and is_accelerator(device) else ""
        raise QuantkitError(
            f"the job needs about {need / GIB:.1f} GiB of memory{where}, {free / GIB:.1f} GiB are free",
            hint=f"use {remedy}",
            exit_code=RESOURCES,
        )


def plan(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    execution: Execution,
    peak: Peak,
    tokens: int,
) -> JobPlan:
    """Sizes of a job over so many `tokens`, exact from shapes; `peak` is what `decide` predicted."""
    checkpoint, scratch = skeleton.checkpoint, 0
    if "curvature" in method.needs and any(spec.grid for spec in specs):
        scratch = scratch_bytes(len(skeleton.blocks), _shapes(skeleton, specs, tokens, 0))
    sizes = method.output.sizes(checkpoint, specs, method.layout)
    staged = sum(method.layout.nbytes(spec) for spec in specs if spec.grid)
    return JobPlan(
        execution=execution,
        memory_bytes=peak.computing,
        host_bytes=peak.host,
        disk_bytes=max(staged + sizes.total, scratch),  # staged blocks, then the merged files beside them
        output_bytes=sizes.total,
        source_bytes=checkpoint.stored_bytes,
        bits_per_weight=sizes.bits_per_weight,
        ranks=ranks.count(),
    )


def _memory(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    tokens: int,
    batch_tokens: int,
    mode: str,
    states: str,
    at_once: int,
) -> Peak:
    """Peak bytes above the interpreter."""
    accelerated = is_accelerator(skeleton.device)
    if not any(spec.grid for spec in specs):  # encoded tensor by tensor, after a forward pass at most
        tensors = skeleton.checkpoint.infos.values()
        encode = ENCODING + max(6 * math.prod(info.shape) for info in tensors)  # as read, and its codes
        forward = forward_memory(skeleton, specs, tokens, batch_tokens) if method.needs else 0
        return Peak(max(encode, forward), encode) if accelerated else Peak(0, max(encode, forward))
    shapes = _shapes(skeleton, specs, tokens, batch_tokens)
    peak = peak_memory(
        shapes,
        calibrated=bool(method.needs),
        hessian="hessian" in method.needs,
        transform=method.transform is not None and method.transform.sample == 1,
        suspend=mode == "suspend",
        tables=method.tables,
        states=states if accelerated else None,
        at_once=at_once,
        drift="drift" in method.needs,
        gradients="curvature" in method.needs,
        sampled=method.transform is not None and method.transform.sample < 1,
    )
    if ranks.in_order() and mode == "repeat" and method.needs:  # inputs of a site wait until it is their turn
        routed = shapes.active * shapes.hidden if shapes.experts else 0
        kept = tokens * max(shapes.widest, shapes.spread, routed) * shapes.element
        peak = Peak(peak.device, peak.host + kept)
    beside = [spec.weights for spec in specs if spec.block is None and spec.grid]
    if not beside:
        return peak
    held = tokens * shapes.hidden * shapes.element if method.needs else 0
    solving = shapes.rest * shapes.element + held + 4 * FLOAT32 * max(beside)
    staged = 2 * min(PART, sum(beside))  # on its way to the disk while the next part is made
    if accelerated:
        return Peak(max(peak.device, solving), max(peak.host, staged))
    return Peak(0, max(peak.host, solving + staged))


def _shapes(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> Shapes:
    """Of a job, as far as memory goes."""
    largest = _largest_block(specs)
    config = skeleton.checkpoint.text_config
    return Shapes(
        linears=[(spec.local, spec.out_features, spec.in_features) for spec in largest],
        rest=_rest(skeleton),
        largest=_largest_outside(skeleton),
        element=skeleton.dtype.itemsize,
        tokens=tokens,
        batch_tokens=batch_tokens,
        width=_hidden_size(skeleton),
        experts=frozenset(streamed(skeleton.blocks[largest[0].block])),
        streamed=skeleton.streams,
        vocabulary=getattr(config, "vocab_size", 0),
        active=next((getattr(config, name) for name in ROUTED if getattr(config, name, None)), 1),
    )


def _largest_block(specs: Sequence[LinearSpec]) -> list[LinearSpec]:
    """The linears of the block that has most weights; of equal ones the first."""
    weights: Counter[int] = Counter()
    for spec in specs:
        if spec.block is not None:
            weights[spec.block] += spec.weights
    index = max(sorted(weights), key=weights.__getitem__)
    return [spec for spec in specs if spec.block == index]


def _hidden_size(skeleton: Skeleton) -> int | None:
    return getattr(skeleton.checkpoint.config.get_text_config(), "hidden_size", None)


def _rest(skeleton: Skeleton) -> int:
    """Parameters outside the blocks."""
    inside = skeleton.names.blocks + "."
    outside = (p for name, p in skeleton.model.named_parameters() if not name.startswith(inside))
    return sum(parameter.numel() for parameter in outside)


def _largest_outside(skeleton: Skeleton) -> int:
    """Bytes of the largest stored tensor that belongs to no block."""
    inside = re.compile(rf"(^|\.){re.escape(skeleton.names.blocks.rpartition('.')[2])}\.\d+\.")
    infos = skeleton.checkpoint.infos.values()
    return max((info.nbytes for info in infos if not inside.search(info.name)), default=0)


def forward_memory(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> int:
    """Peak bytes of running the blocks: rest of the model, one block, the states, a batch's activations."""
    element, shapes = skeleton.dtype.itemsize, _shapes(skeleton, specs, tokens, batch_tokens)
    everywhere = sum(row[1] for row in shapes.linears if row[0] not in shapes.experts)
    states = tokens * shapes.hidden * element
    batch = batch_tokens * (everywhere + 3 * shapes.spread * bool(shapes.experts)) * element
    batch += batch_tokens * shapes.widest * 4 + shapes.waiting
    return (shapes.rest + 2 * shapes.block) * element + states + batch


def check_disk(folder: Path, need: int) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes fit on the disk of `folder`."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise QuantkitError(
            f"{folder} needs about {need / GIB:.2f} GiB of disk, {free / GIB:.2f} GiB are free",
            hint="free some space or choose another --output",
            exit_code=RESOURCES,
        )
