"""Whether a job fits, before anything is loaded: how it runs in the memory there is, or what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quantkit.errors import RESOURCES, QuantkitError
from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed, memory
from quantkit.models.machine.device import free_memory, host_memory, is_accelerator
from quantkit.models.machine.memory import Limit
from quantkit.models.skeleton import Skeleton
from quantkit.options import RunOptions, size_bytes
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare import plan
from quantkit.quantize.prepare.memory import COMFORT, Peak, sites_at_once
from quantkit.quantize.prepare.plan import Execution, JobPlan, Way, sequences_at_once
from quantkit.tables import size

TENTH = 10**8  # bytes: sizes are said in tenths of a GB
FEWEST, SHORTEST = 8, 32  # sequences, and tokens of one, that are worth calibrating on


@dataclass(frozen=True)
class Rooms:
    """Bytes that a job may take: where it computes, and on the host, which is the same place for a CPU."""

    computing: int
    host: int
    device: torch.device
    limit: Limit | None

    @staticmethod
    def of(device: torch.device, limit: Limit | None) -> Rooms:
        """The least of all ranks'."""
        own = [limit.left] if limit else []
        host = distributed.least(min([host_memory(), *own]))
        free = distributed.least(min([free_memory(device), *([] if is_accelerator(device) else own)]))
        return Rooms(free, host, device, limit)

    def hold(self, peak: Peak, share: float = 1.0) -> bool:
        """Whether a peak fits in a share of them."""
        return peak.computing <= share * self.computing and peak.host <= share * self.host

    def check(self, peak: Peak, remedy: str) -> None:
        """Raise QuantkitError (exit code 5) unless it fits."""
        if is_accelerator(self.device):
            check_memory(peak.computing, self.computing, remedy, self.device)
            check_memory(peak.host, self.host, remedy, limit=self.limit)
        else:
            check_memory(peak.computing, self.computing, remedy, limit=self.limit)


def decide(
    skeleton: Skeleton,
    specs: Sequence[LinearSpec],
    method: Method,
    options: RunOptions,
    shape: tuple[int, int],
    kept: dict,
) -> JobPlan:
    """How the job runs on calibration tokens of `shape`, and what it takes so.

    `kept` is the execution of the job being resumed, or empty: where the user says nothing, it stays.
    Of the ways that are left, the fastest that fits the memory well; raises QuantkitError (exit code 5) when
    not even the most frugal fits at all.
    """
    shapes = plan.shapes_of(skeleton, specs, shape[0] * shape[1], 0)
    need = partial(plan.job_memory, skeleton, specs, method, shapes)
    ways = list(_ways(skeleton, method, options, shape, kept))
    rooms = Rooms.of(skeleton.device, Limit.of(asked(options)))
    way = next((way for way in ways if rooms.hold(need(way), COMFORT)), None)
    way = way or min(ways, key=lambda way: (not rooms.hold(need(way)), need(way).computing))
    if way.sequential == "repeat" and "hessian" in method.needs:
        way = replace(way, at_once=sites_at_once(shapes, rooms.computing, need(way).computing))
    peak = need(way)
    if not rooms.hold(peak):
        rooms.check(*_remedy(way, need, rooms, bool(method.needs)))
    dtype = str(skeleton.dtype).removeprefix("torch.")
    how = way.batch_size, way.sequential, torch.get_num_threads(), way.states, way.at_once
    execution = Execution(dtype, str(skeleton.device), *how)
    return plan.plan(skeleton, specs, method, execution, peak, shapes)


def asked(options: RunOptions) -> int | None:
    """Bytes that the whole process may take, if the user said so."""
    return None if options.max_memory is None else size_bytes(options.max_memory, "--max-memory")


def _ways(
    skeleton: Skeleton, method: Method, options: RunOptions, shape: tuple[int, int], kept: dict
) -> Iterator[Way]:
    """How a job may run, the fastest first. Several ranks solve an expert each where none has to wait for
    those before it. Suspended batches hold what they began with: a file would save nothing; and without
    calibration there is nothing to keep."""
    batch_size = sequences_at_once(options.batch_size or kept.get("batch_size"), shape)
    accelerated, asked = is_accelerator(skeleton.device), options.sequential
    asked = kept.get("sequential") if asked == "auto" else asked
    modes = ["repeat"] if skeleton.is_mixture and distributed.count() > 1 else ["suspend", "repeat"]
    for mode in [asked] if asked else modes:
        places = ["device", *(["host"] if accelerated else []), *(["disk"] if mode == "repeat" else [])]
        if options.states != "auto":
            places = [options.states if accelerated or options.states == "disk" else "device"]
        for states in places if method.needs else ["device"]:
            yield Way(mode, states, batch_size, *shape)


def _remedy(way: Way, need: Callable[[Way], Peak], rooms: Rooms, calibrated: bool) -> tuple[Peak, str]:
    """Options by which a job would fit that does not, and the peak to tell: where the limit has to rise, that
    of the way which is named with the new one."""
    accelerated = is_accelerator(rooms.device)
    states = ["host"] * accelerated + ["disk"] if calibrated else []
    ways = [less for place in states for less in _smaller(way, place)]
    if fits := next((less for less in ways if rooms.hold(need(less))), None):
        return need(way), _flags(way, fits)
    least = min([way, *ways], key=lambda way: need(way).host)
    host, limit = need(least).host, rooms.limit
    if limit is None or limit.left > rooms.host or (accelerated and host <= rooms.host):
        return need(way), "a machine with more memory: no option makes it fit"
    tenths = -(-(limit.resident + host) // TENTH)
    least = next(less for less in [way, *ways] if limit.resident + need(less).host <= tenths * TENTH)
    return need(least), f"--max-memory {tenths / 10:g}GB {_flags(way, least)}".strip()


def _smaller(way: Way, states: str) -> Iterator[Way]:
    """Ways that take less and less: first those that change no weight, then less text."""
    yield (way := replace(way, at_once=1, states=states))
    yield (way := replace(way, sequential="repeat"))
    while way.batch_size > 1:
        yield (way := replace(way, batch_size=way.batch_size // 2))
    while way.samples > FEWEST:
        yield (way := replace(way, samples=way.samples // 2))
    while way.seqlen >= 2 * SHORTEST:
        yield (way := replace(way, seqlen=way.seqlen // 2))


def _flags(way: Way, less: Way) -> str:
    """What to type for one way where another was planned."""
    names = ("batch_size", "samples", "seqlen", "sequential", "states")
    changed = [name for name in names if getattr(way, name) != getattr(less, name)]
    return " ".join(f"--{name.replace('_', '-')} {getattr(less, name)}" for name in changed)


def out_of_memory(execution: Execution, block: int) -> QuantkitError:
    """Return the error of a device that ran out of memory in a block; the hint names what takes less."""
    less = f"--batch-size {execution.batch_size // 2}" if execution.batch_size > 1 else "a shorter --seqlen"
    hint = f"start again with {less} --sequential repeat --overwrite"
    if execution.states == "device":
        hint = "finished blocks are kept: run the same command with --resume --states host"
    return QuantkitError(f"{execution.device} ran out of memory in block {block + 1}", hint, RESOURCES)


def check_memory(
    need: int,
    free: int,
    remedy: str,
    device: torch.device | None = None,
    limit: Limit | None = None,
    what: str = "the job",
) -> None:
    """Raise QuantkitError (exit code 5) unless `need` bytes are free, on the host or on `device`. limit: of
    the process, if the user said so."""
    if need <= free:
        return
    where, whose = (f" on {device}", "free") if device is not None and is_accelerator(device) else ("", "")
    left = f"{size(free)} are" if free else "nothing is"
    message = f"{what} needs about {size(need)} of memory{where}, {left} {whose or memory.room().whose}"
    if limit and limit.left <= free and not where:
        message = f"--max-memory of {size(limit.nbytes)} is too small: "
        message += f"Python alone takes about {size(limit.resident)}, {what} {size(need)}"
    raise QuantkitError(message, hint=f"use {remedy}", exit_code=RESOURCES)
