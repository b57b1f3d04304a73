"""Plan a job from shapes alone: how it runs in the free memory, and how much disk it needs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from quantkit.errors import RESOURCES, USAGE, QuantkitError, count, require
from quantkit.layouts import LinearSpec, Statistic
from quantkit.models.machine import distributed
from quantkit.models.machine.device import free_memory, is_accelerator
from quantkit.models.machine.expert_share import ROUTED
from quantkit.models.machine.memory import Limit, room
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.streaming import streamed
from quantkit.options import RunOptions, size_bytes
from quantkit.quantize.calibrate.measure import Execution
from quantkit.quantize.methods import BuiltMethod
from quantkit.quantize.prepare import memory
from quantkit.quantize.prepare.memory import COMFORT, Peak
from quantkit.quantize.prepare.shapes import Shapes, of_largest_block
from quantkit.tables import size

ENCODING = 1 << 24  # temporaries of an encoder
NONE_FITS = "a machine with more memory: no option makes it fit"


@dataclass(frozen=True)
class JobPlan:
    """Predicted peak bytes of each rank, and sizes of the output: bytes of all tensors, bits per weight of
    its quantized matrices. memory_bytes: on the computing device. host_bytes: on the host, in addition to the
    interpreter; both are equal for a CPU."""

    execution: Execution
    memory_bytes: int
    host_bytes: int
    disk_bytes: int
    output_bytes: int
    source_bytes: int
    bits_per_weight: float | None
    bits_per_weight_model: float
    matrices: int
    ranks: int = 1


def sequences_at_once(requested: int | None, shape: tuple[int, int], skeleton: Skeleton) -> int:
    """Return the number of sequences per forward pass. shape: `[samples, seqlen]` of the
    calibration tokens. By default every rank gets some.

    Raises QuantkitError if a rank would get none.
    """
    samples, seqlen = shape
    width = getattr(skeleton.checkpoint.text_config, "hidden_size", None) or 0
    most = memory.tokens_at_once(is_accelerator(skeleton.device), width, skeleton.is_mixture)
    size = requested or max(1, min(most // seqlen, samples // distributed.count()))
    what = f"{count(samples, 'calibration sequence')} in batches of {size} are fewer batches than the "
    what += f"{distributed.count()} processes"
    hint = "start fewer processes, or use a smaller --batch-size or more --samples"
    require(-(-samples // size) >= distributed.count(), what, hint, USAGE)
    return size


def job_memory(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: BuiltMethod,
    shapes: Shapes,
    shape: tuple[int, int],
    execution: Execution,
) -> Peak:
    """Return the peak bytes of one rank. shape: `[samples, seqlen]` of the calibration tokens."""
    accelerated, (samples, seqlen) = is_accelerator(skeleton.device), shape
    batches = -(-samples // execution.batch_size)
    samples = min(samples, execution.batch_size * -(-batches // distributed.count()))  # at most, on one rank
    shapes = replace(
        shapes, tokens=samples * seqlen, batch_tokens=min(execution.batch_size, samples) * seqlen
    )
    if not any(spec.grid for spec in specs):  # encoded tensor by tensor, after a forward pass at most
        encode = ENCODING + method.output.encoding(skeleton.checkpoint)
        forward = memory.forward_memory(shapes, execution.states == "disk") if method.needs else 0
        rest = (shapes.rest - shapes.by_rows) * shapes.element
        loss = memory.loss_memory(shapes) and rest + memory.loss_memory(shapes)
        peak = max(encode, forward, loss)
        return Peak(peak, encode + shapes.by_rows * shapes.element) if accelerated else Peak(0, peak)
    sample = method.transform.sample if method.transform else 0
    wide = (spec for spec in specs if spec.grid and spec.in_features > 2 * memory.GROUP)
    stages = memory.Stages(
        shapes,
        method.needs,
        sample,
        outside=method.outside or any(spec.embedding for spec in specs),
        suspend=execution.sequential == "suspend",
        states=execution.states,
        accelerated=accelerated,
        at_once=execution.at_once,
        feeds_back=method.solver.feeds_back,
        whole_rows=any(spec.grid.group_size >= spec.in_features for spec in wide),
    )
    return memory.peak_memory(stages)


def shapes_of(skeleton: Skeleton, specs: Sequence[LinearSpec], tokens: int, batch_tokens: int) -> Shapes:
    """Return the shapes that decide memory. The embedding is solved in parts, so it does not count."""
    config, inside = skeleton.checkpoint.text_config, f"{skeleton.names.blocks}."
    stored = re.compile(rf"(^|\.){re.escape(inside.split('.')[-2])}\.\d+\.")
    infos = skeleton.checkpoint.infos.values()
    parameters = dict(skeleton.model.named_parameters())
    by_rows = {} if any(spec.head for spec in specs) else skeleton.rows_away()
    return of_largest_block(
        ((s.block, (s.local, s.out_features, s.in_features)) for s in specs if not s.embedding),
        lambda block: streamed(skeleton.blocks[block]),
        rest=sum(p.numel() for name, p in parameters.items() if not name.startswith(inside)),
        by_rows=sum(weight.numel() for weight in {module.weight for module in by_rows}),
        largest=max((info.nbytes for info in infos if not stored.search(info.name)), default=0),
        element=skeleton.dtype.itemsize,
        tokens=tokens,
        batch_tokens=batch_tokens,
        width=getattr(config, "hidden_size", None),
        streamed=skeleton.streams,
        active=next((getattr(config, name) for name in ROUTED if getattr(config, name, None)), 1),
    )


def check_disk(folder: Path, need: int) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes fit on the disk of `folder`."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    what = f"{folder} needs about {size(need)} of disk, {size(free)} are free"
    require(need <= free, what, "free some space or choose another -o", RESOURCES)


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes on the computing device and on the host; for a CPU both are the same memory."""

    computing: int
    host: int
    device: torch.device
    limit: Limit | None

    @staticmethod
    def of(device: torch.device, max_memory: str | None) -> FreeMemory:
        """Return the smallest free memory over all ranks, within --max-memory."""
        limit = Limit.of(None if max_memory is None else size_bytes(max_memory, "--max-memory"))
        limits = [limit.left] if limit else []
        host = min(distributed.all_gather(min([room().nbytes, *limits])))
        free = min([free_memory(device), *([] if is_accelerator(device) else limits)])
        free = min(distributed.all_gather(free))
        return FreeMemory(free, host if is_accelerator(device) else free, device, limit)

    def holds(self, peak: Peak, share: float = 1.0) -> bool:
        """Return whether a peak fits in a share of this memory."""
        return peak.computing <= share * self.computing and peak.host <= share * self.host

    def check(self, peak: Peak, remedy: str) -> None:
        """Raise QuantkitError (exit code 5) unless a peak fits."""
        if is_accelerator(self.device):
            check_memory(peak.computing, self.computing, remedy, self.device)
        if self.limit and self.limit.left <= self.host:
            remedy = self.limit.raised(peak.host) + f", or {remedy}" * (remedy != NONE_FITS)
        check_memory(peak.host, self.host, remedy, torch.device("cpu"), self.limit)


def decide(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: BuiltMethod,
    options: RunOptions,
    shape: tuple[int, int],
    adopted: dict,
    predicted: int = 0,
) -> JobPlan:
    """Plan the job on calibration tokens of `shape [samples, seqlen]`.

    adopted: the resumed job's execution, or {}; used for options that the user left open. predicted: see
    Shapes. Chooses the fastest execution that fits in COMFORT of the memory. Raises QuantkitError (exit code
    5) if the execution with the least memory does not fit.
    """
    shapes = replace(shapes_of(skeleton, specs, shape[0] * shape[1], 0), predicted=predicted)
    peak_of = partial(job_memory, skeleton, specs, method)
    need = partial(peak_of, shapes, shape)
    executions = list(_executions(skeleton, method, options, shape, adopted))
    free = FreeMemory.of(skeleton.device, options.max_memory)
    execution = next((e for e in executions if free.holds(need(e), COMFORT)), None) or min(
        executions, key=lambda e: (not free.holds(need(e)), need(e).computing)
    )
    if execution.sequential == "repeat" and Statistic.HESSIAN in method.needs:
        execution = replace(execution, at_once=memory.sites_at_once(shapes, free.computing, need(execution)))
    peak = need(execution)
    free.check(peak, "" if free.holds(peak) else _remedy(free, peak_of, shapes, shape, options, execution))
    scratch, spilled = 0, 0
    if Statistic.CURVATURE in method.needs and any(spec.grid for spec in specs):
        scratch = memory.scratch_bytes(len(skeleton.blocks), shapes)
    if execution.states == "disk":
        spilled = shapes.states * (2 if Statistic.DRIFT in method.needs else 1)
    sizes = method.output.sizes(skeleton.checkpoint, specs, method.layout)
    staged = sum(method.layout.nbytes(spec) for spec in specs if spec.grid)
    return JobPlan(
        execution=execution,
        memory_bytes=peak.computing,
        host_bytes=peak.host,
        disk_bytes=max(staged + sizes.total, scratch) + spilled,  # staged blocks, then the files
        output_bytes=sizes.total,
        source_bytes=skeleton.checkpoint.stored_bytes,
        bits_per_weight=sizes.bits_per_weight,
        bits_per_weight_model=8 * sizes.total / method.output.parameters(skeleton),
        matrices=sizes.matrices,
        ranks=distributed.count(),
    )


def _remedy(
    free: FreeMemory,
    peak_of: Callable[[Shapes, tuple[int, int], Execution], Peak],
    shapes: Shapes,
    shape: tuple[int, int],
    options: RunOptions,
    execution: Execution,
) -> str:
    """Return the flags with which a calibrated job fits, and its memory then. They cost time first, then the
    measured loss, then calibration text."""
    least = replace(execution, sequential="repeat", states="disk", at_once=1)
    halves = [shape[0] >> power for power in range(shape[0].bit_length())]
    for samples, predicted, batch_size in product(halves, (shapes.predicted, 0), (execution.batch_size, 1)):
        run = replace(least, batch_size=batch_size)
        peak = peak_of(replace(shapes, predicted=predicted), (samples, shape[1]), run)
        if samples >= distributed.count() and free.holds(peak):
            changes = {
                f"--samples {samples}": samples < shape[0],
                "--sequential repeat": options.sequential == "suspend",
                "--states disk": options.states in ("device", "host"),
                "--batch-size 1": batch_size < execution.batch_size,
                "--loss-tokens 0": predicted < shapes.predicted,
            }
            flags = " ".join(flag for flag, differs in changes.items() if differs)
            return f"{flags}, with which the job needs about {size(peak.computing)}" if flags else NONE_FITS
    return NONE_FITS


def _executions(
    skeleton: Skeleton, method: BuiltMethod, options: RunOptions, shape: tuple[int, int], adopted: dict
) -> Iterator[Execution]:
    """Yield the executions of a job, fastest first. Ranks can only share experts in repeated forward passes.
    An accelerator repeats them in a tenth of the time of a solve, and suspended batches would be most of its
    memory. They keep their states in memory, so `disk` saves nothing there. A data-free job has no states."""
    batch_size = sequences_at_once(options.batch_size or adopted.get("batch_size"), shape, skeleton)
    dtype, device = str(skeleton.dtype).removeprefix("torch."), str(skeleton.device)
    accelerated, requested = is_accelerator(skeleton.device), options.sequential
    requested = adopted.get("sequential") if requested == "auto" else requested
    apart = skeleton.is_mixture and distributed.count() > 1
    repeats = apart or (accelerated and Statistic.HESSIAN in method.needs)
    modes = ["repeat"] if repeats else ["suspend", "repeat"]
    for mode in [requested] if requested else modes:
        places = ["device", *(["host"] if accelerated else []), *(["disk"] if mode == "repeat" else [])]
        if options.states != "auto":
            places = [options.states if accelerated or options.states == "disk" else "device"]
        for states in places if method.needs else ["device"]:
            yield Execution(dtype, device, batch_size, mode, torch.get_num_threads(), states)


def frugal(execution: Execution) -> Execution | None:
    """Return the execution with the least memory and the same output; None if it is already this one."""
    states = "disk" if execution.states == "disk" else "host"
    least = replace(execution, sequential="repeat", states=states, at_once=1)
    return None if least == execution else least


def out_of_memory(execution: Execution, block: int) -> QuantkitError:
    """Return the error for a device that ran out of memory, with a hint at options that need less."""
    less = f"--batch-size {execution.batch_size // 2}" if execution.batch_size > 1 else "a shorter --seqlen"
    hint = f"start again with {less} --sequential repeat --overwrite"
    if execution.states == "device":
        hint = "finished blocks are kept: run the same command with --resume --states host"
    return QuantkitError(f"{execution.device} ran out of memory in block {block + 1}", hint, RESOURCES)


def check_memory(
    need: int, free: int, remedy: str, device: torch.device, limit: Limit | None = None, what: str = "the job"
) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes are free, on the host or on `device`. limit: the
    limit by --max-memory, if set."""
    if need <= free:
        return
    where, whose = (f" on {device}", "free") if is_accelerator(device) else ("", "")
    left = f"{size(free)} are" if free else "nothing is"
    message = f"{what} needs about {size(need)} of memory{where}, {left} {whose or room().whose}"
    if limit and limit.left <= free and not where:
        message = f"--max-memory of {size(limit.nbytes)} is too small: "
        message += f"Python and tokenizer take about {size(limit.resident)}, {what} {size(need)}"
    raise QuantkitError(message, hint=f"use {remedy}", exit_code=RESOURCES)
