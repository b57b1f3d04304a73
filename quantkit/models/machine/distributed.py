"""Several processes in one job, started by torchrun: torch.distributed's group, shares of work, results.

Rank r of n processes its share of the calibration batches, sums statistics with the others, and solves some
of the linears. A single process is rank 0 of 1, and then this module does nothing. All ranks run the same
code. Where they might decide differently (free memory, files), rank 0 decides and broadcasts.

torchrun ends all processes when one ends with an error; an operation that takes longer than TIMEOUT is an
error. torch is imported late, because `plan` and help also ask for the rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import INTERRUPTED, TERMINATED, UNSUPPORTED, QuantkitError, first_line, require

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

HANDSHAKE = 45  # seconds until all ranks must have joined
TIMEOUT = timedelta(hours=2)  # limit of an operation: other ranks wait while rank 0 writes and verifies
SPEAK = 5.0  # seconds until rank 0 must have printed another rank's error; then that rank prints it
SETTLE = 1.0  # seconds until the rank that failed first must have reported its error
ALONE = "start the processes with torchrun; or unset WORLD_SIZE and RANK for one process"
NETWORK = "of several hosts, name the network between them: GLOO_SOCKET_IFNAME=eth0, or NCCL_SOCKET_IFNAME"


class LostError(QuantkitError):
    """Another rank did not start, has ended, or did not answer within TIMEOUT."""


@dataclass(frozen=True)
class _Group:
    """This process among the ranks. local: ranks on this host. store: of the rendezvous. thread: runs all
    operations, so that the main thread handles signals while it waits."""

    rank: int
    count: int
    local: int
    store: Any
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "distributed"))


_group: _Group | None = None
_alone = False  # this is rank 0, and the others wait for the result of its work


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


def count() -> int:
    """Return the number of ranks."""
    return _group.count if _group else 1


def rank() -> int:
    """Return this process's rank; rank 0 writes and prints."""
    return _group.rank if _group else 0


def local() -> int:
    """Return the number of ranks that share this host's memory."""
    return _group.local if _group else 1


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Make this process a rank of torchrun's group. device: the value of `--device`; with several GPUs, this
    process sees only its own.

    Raises QuantkitError if other ranks do not start. After an error the group remains, for `verdict`.
    """
    global _group
    ranks, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    accelerated = _choose_gpu(device, _number("LOCAL_RANK", 0))
    thread = ThreadPoolExecutor(1, "rendezvous")
    try:
        store = thread.submit(_rendezvous, rank, ranks, accelerated).result(HANDSHAKE)
    except (RuntimeError, ValueError, KeyError, TimeoutError) as error:
        silent = f"no answer from {os.environ.get('MASTER_ADDR')}"
        why = silent if isinstance(error, TimeoutError) else first_line(error)
        raise LostError(
            f"the {ranks} processes of WORLD_SIZE did not find each other within {HANDSHAKE} s: {why}",
            f"{ALONE}; {NETWORK}",
        ) from error
    thread.shutdown()
    _group = _Group(rank, ranks, _number("LOCAL_WORLD_SIZE", 1), store)
    kinds = all_gather(accelerated)
    if len(set(kinds)) > 1:
        what = f"rank {kinds.index(False)} has no GPU of its own, other ranks have one"
        hint = "start one process per GPU, or compute on the CPU with --device cpu"
        raise QuantkitError(what, hint, UNSUPPORTED)
    yield
    all_gather(None)  # wait until no rank needs the store any more
    _group.thread.shutdown()
    _group = None
    _distributed().destroy_process_group()


def _rendezvous(rank: int, ranks: int, accelerated: bool) -> Any:
    """Create torch's process group and return its store."""
    import torch

    dist = _distributed()
    store, *_ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=HANDSHAKE)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if accelerated else "gloo",
        store=dist.PrefixStore("quantkit", store),
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        **({"device_id": torch.device("cuda", 0)} if accelerated else {}),
    )
    return store


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _choose_gpu(device: str, local_rank: int) -> bool:
    """Return whether this process computes on a GPU; if so, hide the other GPUs from it."""
    what = f"--device {device}: each of several processes has a device of its own"
    hint = "leave --device out: rank 0 of a host takes its first GPU, and so on; or give --device cpu"
    require(device in ("auto", "cuda", "cpu"), what, hint, UNSUPPORTED)
    if device == "cpu":
        return False
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(visible) != 1:  # another launcher may have chosen already
        gpu = visible[local_rank] if local_rank < len(visible) else str(local_rank)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    return torch.cuda.is_available()


# ---- shares


def span(total: int) -> range:
    """Return this rank's range of `total` items; the ranks' ranges differ by at most one item."""
    return range(total * rank() // count(), total * (rank() + 1) // count())


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this rank's contiguous part of a sequence."""
    indices = span(len(items))
    return items if count() == 1 else items[indices.start : indices.stop]


def dealt(items: Sequence[T]) -> Sequence[T]:
    """Return every n-th item of a sequence for n ranks, beginning at this rank's number."""
    return items[rank() :: count()]


# ---- results


def _together(operation: Callable[..., object], *arguments: Any) -> None:
    """Run an operation on all ranks. Raises LostError if torch fails or another rank reports a failure."""
    running = _group.thread.submit(operation, *arguments)
    try:
        while not wait([running], SETTLE).done:
            if _group.store.check(["failure"]):
                raise LostError("another rank failed")
        running.result()
    except RuntimeError as error:
        raise LostError(first_line(error)) from error


def _reduced(tensor: Tensor, how: str) -> Tensor:
    if count() == 1:
        return tensor
    dist, contiguous = _distributed(), tensor.contiguous()
    _together(dist.all_reduce, contiguous, getattr(dist.ReduceOp, how))
    return tensor if contiguous is tensor else tensor.copy_(contiguous)


def sum_(tensor: Tensor) -> Tensor:
    """Replace a tensor by the sum over all ranks, in its own precision, and return it."""
    return _reduced(tensor, "SUM")


def largest_(tensor: Tensor) -> Tensor:
    """Replace a tensor by the elementwise maximum over all ranks, and return it."""
    return _reduced(tensor, "MAX")


def broadcast(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on all ranks. Inside `work` the other ranks wait for the
    result, so a broadcast there only runs its own work."""
    global _alone
    if count() == 1 or _alone:
        return work()
    box = [None]
    if rank() == 0:
        _alone = True
        try:
            box = [work()]
        finally:
            _alone = False
    _together(_distributed().broadcast_object_list, box, 0)
    return box[0]


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks in the order of ranks. Tensors keep their device."""
    if count() == 1:
        return [value]
    values: list[T] = [None] * count()
    _together(_distributed().all_gather_object, values, value)
    return values


# ---- how it ends


def verdict(error: QuantkitError) -> tuple[QuantkitError, bool]:
    """Return the error that this process ends with, and whether this process prints it.

    All ranks end with the error of the rank that failed first. Rank 0 prints it; if rank 0 is dead or busy
    for SPEAK seconds, another rank does. A rank that was lost or terminated did not fail by itself.
    """
    if _group is None:
        rank = os.environ.get("RANK", "0")
        return error, rank == "0" or not rank.isdecimal() or isinstance(error, LostError)
    rank, store = _group.rank, _group.store
    stopped = error.exit_code in (INTERRUPTED, TERMINATED)
    try:
        if not (stopped or isinstance(error, LostError)):
            failure = [rank, error.message, error.hint, error.exit_code]
            store.compare_set("failure", "", json.dumps(failure))
        if not stopped:
            store.set(f"ended/{rank}", "")
        ending = _first(error) if _comes("failure", SETTLE) else _named(error, stopped)
        silent = rank and _comes("reported", SPEAK)
        speaks = not silent and store.compare_set("reported", "", str(rank)) == str(rank).encode()
    except RuntimeError:  # the rank that holds the store has ended
        return error, not stopped
    return ending, speaks


def _first(error: QuantkitError) -> QuantkitError:
    """Return the failure that was reported first; the given error if it is the same."""
    failed, message, hint, exit_code = json.loads(_group.store.get("failure"))
    if message == error.message and _group.rank == 0:
        return error
    return QuantkitError(f"rank {failed}: {message}" if failed else message, hint or error.hint, exit_code)


def _named(error: QuantkitError, stopped: bool) -> QuantkitError:
    """Return an error naming the ranks that vanished without reporting a failure."""
    if stopped:
        return error
    others = [other for other in range(_group.count) if other != _group.rank]
    lost = [str(other) for other in others if not _group.store.check([f"ended/{other}"])]
    prefix = f"rank {', '.join(lost)} was lost: " if lost else "the ranks lost one another: "
    return QuantkitError(prefix + error.message, error.hint, error.exit_code)


def _comes(key: str, seconds: float) -> bool:
    """Return whether a key appears in the store within `seconds`."""
    end = time.monotonic() + seconds
    while not (exists := _group.store.check([key])) and time.monotonic() < end:
        time.sleep(0.05)
    return exists
