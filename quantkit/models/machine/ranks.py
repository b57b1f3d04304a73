"""Several processes at one job, as torchrun starts them: who does what, and how results come together.

Rank r of n has its share of the calibration batches, adds up statistics with the others, and solves a share
of every site's rows. One process is rank 0 of 1: then nothing here does anything. All ranks take the same way
through the code; where they might decide differently (free memory, what is on the disk), the first decides
and the others are `told`.

Sums are added in an order that depends on the number of ranks alone, so the same number gives the same bytes.
torch is imported late: plans and help ask for the rank, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import RUNTIME, UNSUPPORTED, QuantkitError, first_line
from quantkit.models.machine.heartbeat import Failure, Heartbeat

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

HANDSHAKE = 45  # seconds for all ranks to come
TOLD = 15  # seconds for another rank to tell this one's error; on a busy machine it is slow to notice
EVER = timedelta(days=100)  # of an operation: who hangs is the heartbeat's business
AT_ONCE = 1 << 24  # values of a sum that travel together: a slow network gets somewhere in between
NO_WAY = "of several hosts, name the network between them: GLOO_SOCKET_IFNAME=eth0, or NCCL_SOCKET_IFNAME"
_heartbeat: Heartbeat | None = None
_count, _local = 1, 1  # ranks, and those on this host
_accelerated = False


def wanted() -> int:
    """How many ranks the environment speaks of; 1 for a process that nobody started beside others."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def wanted_rank() -> int:
    """Which of them this process is to be."""
    return int(os.environ.get("RANK") or 0) if wanted() > 1 else 0


def count() -> int:
    """How many ranks there are."""
    return _count if _heartbeat else 1


def rank() -> int:
    """Which of them this process is; the first one writes and speaks."""
    return _heartbeat.rank if _heartbeat else 0


def local() -> int:
    """How many of them share this host's memory."""
    return _local if _heartbeat else 1


def _group() -> Any:
    import torch.distributed

    return torch.distributed


@contextmanager
def joined(device: str, say: Callable[[Failure, str], None]) -> Iterator[None]:
    """Meanwhile this process is one of several. device: as `--device` has it; of several GPUs this process
    sees its own alone. say: how a failure is told; see `Heartbeat`.

    Raises QuantkitError if the others do not come.
    """
    global _heartbeat, _count, _local, _accelerated
    _count, _local = wanted(), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    _accelerated = accelerated = _choose_gpu(device)
    import torch

    dist, whole = _group(), wanted()
    backend = "cpu:gloo,cuda:nccl" if accelerated else "gloo"
    soon = timedelta(seconds=HANDSHAKE)
    try:
        store, number, _ = next(dist.rendezvous("env://", wanted_rank(), whole, timeout=soon))
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = dist.TCPStore(*address, whole, False, timeout=soon, wait_for_workers=False)
        own = dist.PrefixStore(f"quantkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", own)
        heartbeat = Heartbeat(own, number, whole, say)
        own.wait([f"beat/{other}" for other in range(whole)], soon)
    except (RuntimeError, ValueError, KeyError) as error:
        raise QuantkitError(
            f"the {whole} processes that WORLD_SIZE speaks of did not find each other within {HANDSHAKE} s: "
            + first_line(error),
            "start them with torchrun; or unset WORLD_SIZE and RANK for one process",
        ) from error
    _heartbeat = heartbeat
    heartbeat.start()
    with _together(NO_WAY):
        options = {"device_id": torch.device("cuda", 0)} if accelerated else {}
        group = dist.PrefixStore("quantkit/group", store)
        dist.init_process_group(backend, store=group, rank=number, world_size=whole, timeout=EVER, **options)
    kinds = gathered(accelerated)
    if len(set(kinds)) > 1:
        raise QuantkitError(
            f"rank {kinds.index(False)} has no GPU for itself, others have one",
            "start one process per GPU, or compute on the CPU with --device cpu",
            UNSUPPORTED,
        )
    yield  # after an error the heartbeat goes on: `verdict` asks it
    gathered(None)
    heartbeat.leave()
    gathered(None)  # all have left: nobody misses the one that holds the store
    dist.destroy_process_group()
    _heartbeat = None


def _choose_gpu(device: str) -> bool:
    """Whether this process computes on a GPU, which it then sees as the only one."""
    if device not in ("auto", "cuda", "cpu"):
        raise QuantkitError(
            f"--device {device}: each of several processes has a device of its own",
            "leave --device out: rank 0 of a host takes its first GPU, and so on; or give --device cpu",
            UNSUPPORTED,
        )
    if device == "cpu":
        return False
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    place = int(os.environ.get("LOCAL_RANK") or 0)
    if len(seen) != 1:  # another launcher may have chosen already
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[place] if place < len(seen) else str(place)
    import torch

    return torch.cuda.is_available()


# ---- shares


def span(total: int) -> range:
    """Which of `total` items in a row are this rank's: as many as the others', or one more."""
    return spans(total)[rank()]


def spans(total: int) -> list[range]:
    """The same of every rank."""
    ends = [total * number // count() for number in range(count() + 1)]
    return [range(start, end) for start, end in zip(ends, ends[1:], strict=False)]


def share(items: Sequence[T]) -> Sequence[T]:
    """This rank's part of a sequence; all parts in the order of ranks are the whole."""
    own = span(len(items))
    return items if count() == 1 else items[own.start : own.stop]


def dealt(items: Sequence[T]) -> Sequence[T]:
    """This rank's of few unlike items, dealt one by one."""
    return items[rank() :: count()]


# ---- results


@contextmanager
def _together(hint: str = "") -> Iterator[None]:
    """Around every operation of all ranks. hint: what to do where it fails."""
    try:
        with _heartbeat.waiting():
            yield
    except RuntimeError as error:  # of the network: another rank has left
        found = _heartbeat.look_for(5)
        message = found.message if found else f"the ranks lost one another: {first_line(error)}"
        raise QuantkitError(message, hint, RUNTIME) from error


def _finished(tensor: Tensor) -> None:
    """Wait for the device, so that the heartbeat knows what is being waited for."""
    if tensor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(tensor.device)


def _reduced(tensor: Tensor, how: str) -> Tensor:
    if count() == 1:
        return tensor
    dist, whole = _group(), tensor if tensor.is_contiguous() else tensor.contiguous()
    for part in whole.view(-1).split(AT_ONCE):
        with _together():
            dist.all_reduce(part, op=getattr(dist.ReduceOp, how))
            _finished(part)
    return tensor if whole is tensor else tensor.copy_(whole)


def sum_(tensor: Tensor) -> Tensor:
    """The sum over all ranks, in the tensor's own precision, in its place."""
    return _reduced(tensor, "SUM")


def in_order() -> bool:
    """Whether all is to be what one process makes of it, to the last bit, at the price that ranks wait for
    one another: on CPUs. On GPUs sums are added up as is fastest, and linears are cut."""
    return count() > 1 and not _accelerated


def in_turn(sums: Sequence[Tensor], add: Callable[[int], object]) -> None:
    """Let `add(k)` on every rank add what it has to sum k, in place, behind the ranks before it: in the order
    in which one process would. A rank is at work on one sum while the next is on the one before. Where ranks
    are not `in_order`, `add` has nothing left to add, and the sums themselves are added up."""
    if not in_order():
        for part in sums:
            sum_(part)
        return
    dist, last, sending = _group(), count() - 1, []
    for k, part in enumerate(sums):
        if rank():
            before = _empty(part)
            with _together():
                dist.recv(before, rank() - 1)
                _finished(before)
            part.copy_(before)
        add(k)
        if rank() < last:
            after = part.contiguous()
            sending.append((dist.isend(after, rank() + 1), after))
    with _together():
        for work, _ in sending:
            work.wait()
    for part in sums:
        whole = part.contiguous()
        with _together():
            dist.broadcast(whole, last)
            _finished(whole)
        if whole is not part:
            part.copy_(whole)


def _empty(like: Tensor) -> Tensor:
    import torch

    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def largest_(tensor: Tensor) -> Tensor:
    """The largest over all ranks, value by value, in its place."""
    return _reduced(tensor, "MAX")


def least(number: int) -> int:
    """The least over all ranks."""
    return min(gathered(number))


def any_(holds: bool) -> bool:
    """Whether it holds on some rank."""
    return any(gathered(holds))


def told(work: Callable[[], T]) -> T:
    """What the first rank's `work` returns, on all of them; the others do nothing meanwhile."""
    if count() == 1:
        return work()
    return _from(0, work() if rank() == 0 else None)


def gathered(value: T) -> list[T]:
    """What every rank has here, in their order. Tensors inside come to the device they are on."""
    if count() == 1:
        return [value]
    return [_from(other, value) for other in range(count())]


def _from(source: int, value: T) -> T:
    """A rank's value on all of them."""
    import torch

    from quantkit.models.machine import parcels

    dist, own = _group(), rank() == source
    text, tensors = parcels.packed(value) if own else (b"", [])
    size = torch.tensor([len(text)])
    with _together():
        dist.broadcast(size, source)
    packed = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if own
        else torch.empty(*size.tolist(), dtype=torch.uint8)
    )
    with _together():
        dist.broadcast(packed, source)
    if own:
        received = tensors
    else:
        text = packed.numpy().tobytes()
        kinds = parcels.kinds_of(text)
        received = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
    for tensor in received:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for part in flat.split(4 * AT_ONCE):
            with _together():
                dist.broadcast(part, source)
                _finished(part)
    return value if own else parcels.unpacked(text, received)


# ---- how it ends


def keep(hint: str) -> None:
    """What to tell the user where a rank is lost from here on: how to go on."""
    if _heartbeat:
        _heartbeat.kept = hint


def failure() -> Failure | None:
    """What ended the job on another rank, as far as it is known."""
    return _heartbeat.failure if _heartbeat else None


def verdict(error: QuantkitError) -> tuple[QuantkitError, bool]:
    """What this process ends with, and whether it is to tell it: all ranks end with the same error, and the
    first tells it, with the name of the rank where it is another's."""
    if not _heartbeat:
        return error, wanted_rank() == 0
    known, number, _heartbeat.ending = _heartbeat.failure, _heartbeat.rank, True
    stopped = error.exit_code in (130, 143) and known is None
    own = Failure(None if stopped else number, error.message, error.hint, error.exit_code)
    found = _heartbeat.look_for(1.5) if stopped else known
    if found is None:
        found = own if stopped else _heartbeat.blame(own)
    alike = found.message == error.message  # all ranks had it: whose was the first says nothing
    its_own = (known is None and number == 0) or found.rank is None or alike
    ending = error if its_own and not found.gone else named(found, _heartbeat.kept or error.hint)
    speaks = number == 0 if its_own else _heartbeat.is_speaker(found)
    if not speaks and found.rank == number:
        speaks = not _heartbeat.wait_told(TOLD)
    speaks = _heartbeat.may_speak() and speaks
    return ending, speaks


def named(found: Failure, hint: str) -> QuantkitError:
    """The error that a rank's failure is told as."""
    message = found.message if found.gone or found.rank is None else f"rank {found.rank}: {found.message}"
    return QuantkitError(message, found.hint or hint, found.exit_code)


def leave(spoken: bool) -> None:
    """Go after an error, without waiting for anybody. spoken: this rank has told it."""
    if _heartbeat and spoken:
        _heartbeat.told()
    if _heartbeat:
        _heartbeat.leave()
    if _heartbeat and spoken:
        _heartbeat.wait_left(10)
