"""Hidden states of all tokens on their way through the blocks, batch by batch."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from quantkit.models.machine.device import Lane, free_memory, host_buffer, is_accelerator

SHARE = 0.25  # of an accelerator's free memory that states may take where nobody planned for them


@dataclass(frozen=True)
class Place:
    """Where states wait: `device`, `host`, or `disk`, in a file of `folder`."""

    where: str = "device"
    folder: Path | None = None


HERE = Place()


class States:
    """Batches of hidden states `[batch, tokens, hidden]`, or of all that flows from block to block, used on
    `device` and kept there, on the host, or in a file.

    Kept on the host, a batch is copied back while the next one is computed, and the next one copied ahead
    while this one is used. What is read is a batch on the device whatever the place.
    """

    def __init__(self, batches: Iterable[Tensor], device: torch.device, place: Place = HERE):
        self.on_host, on_host = False, place.where == "host" and is_accelerator(device)
        self.changes = 0  # batches that were replaced since the beginning
        self._device = device
        self._lane: Lane | None = None
        self._sent: dict[int, Tensor] = {}  # on their way to the device
        self._here: dict[int, Tensor] = {}  # the one that was read last
        self._kept: list[Tensor] | Spill = Spill(place.folder) if place.where == "disk" else []
        for hidden in batches:
            self._kept.append(_on_host(hidden) if on_host else hidden)
        if on_host:
            self.move_to_host()

    @property
    def spilled(self) -> bool:
        """Whether they wait in a file."""
        return isinstance(self._kept, Spill)

    def move_to_host(self) -> None:
        """From now on they wait in the host's memory, unless they are in a file."""
        if self.spilled:
            return
        self.on_host, self._lane = True, Lane(self._device)
        for k, hidden in enumerate(self._kept):
            self._kept[k] = _on_host(hidden)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, k: int) -> Tensor:
        if k in self._here:
            return self._here[k]
        if self.spilled:
            self._here = {}  # before another takes its place
            self._here = {k: self._kept[k].to(self._device)}
            return self._here[k]
        if not self.on_host:
            return self._kept[k]
        sent = self._sent.pop(k, None)
        hidden = self._lane.receive(self._lane.send(self._kept[k]) if sent is None else sent)
        ahead = k + 1
        self._sent = {at: sent for at, sent in self._sent.items() if at == ahead}
        if ahead < len(self) and ahead not in self._sent:
            self._sent[ahead] = self._lane.send(self._kept[ahead])
        self._here = {k: hidden}
        return hidden

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        self.changes += 1
        self._here.pop(k, None)
        if not self.on_host:
            self._kept[k] = hidden
            return
        self._sent.pop(k, None)
        if hidden.shape != self._kept[k].shape:  # blocks left something beside their hidden states
            self._kept[k] = host_buffer(hidden)
        self._kept[k].copy_(hidden, non_blocking=True)

    def advance(self, outputs: Iterable[Tensor]) -> None:
        """Replace all batches by a block's outputs, which may be made of them one by one."""
        for k, hidden in enumerate(outputs):
            self[k] = hidden
        assert k + 1 == len(self), "as many outputs as batches"

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))


def embedded(
    ids: Sequence[Tensor],
    embed: Callable[[Tensor], Tensor],
    device: torch.device,
    place: Place | None = None,
) -> States:
    """States that enter the first block for batches of `ids`, kept at a place that was planned, or else where
    there is room for them."""
    first = embed(ids[0])
    if place is None:
        crowded = is_accelerator(device) and first.nbytes * len(ids) > SHARE * free_memory(device)
        place = Place("host") if crowded else HERE
    return States(chain([first], map(embed, ids[1:])), device, place)


def _on_host(hidden: Tensor) -> Tensor:
    """A copy in a buffer of the host that copies to the device can read beside other work."""
    if hidden.device.type == "cpu":
        return hidden
    buffer = host_buffer(hidden)
    buffer.copy_(hidden, non_blocking=True)
    return buffer


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies: so many bytes from `offset` on are its own, whatever it is replaced by."""

    offset: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class Spill:
    """Tensors by number, in a file of `folder` that has no name: it is gone when this is, even after a kill.

    A tensor is mapped, copied out and unmapped: mapped pages would count as the process's memory. It is
    written by plain writes, as a full disk kills whoever writes to a mapped page.
    """

    def __init__(self, folder: Path):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        self._file = tempfile.TemporaryFile(dir=existing, buffering=0)
        self._slots: list[_Slot] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._slots)

    def shape(self, k: int) -> torch.Size:
        """Of tensor k."""
        return self._slots[k].shape

    def append(self, tensor: Tensor) -> None:
        """One more."""
        self._slots.append(self._slot(tensor))
        self[len(self) - 1] = tensor

    def _slot(self, tensor: Tensor) -> _Slot:
        found = _Slot(self._end, tensor.nbytes, tensor.shape, tensor.dtype)
        step = mmap.ALLOCATIONGRANULARITY
        self._end += -(-tensor.nbytes // step) * step
        return found

    def __getitem__(self, k: int) -> Tensor:
        """On the host."""
        slot = self._slots[k]
        used = math.prod(slot.shape) * slot.dtype.itemsize
        mapped = mmap.mmap(self._file.fileno(), used, access=mmap.ACCESS_COPY, offset=slot.offset)
        return torch.frombuffer(mapped, dtype=slot.dtype).view(slot.shape).clone()

    def __setitem__(self, k: int, tensor: Tensor) -> None:
        """Replace one, by one that may be of another shape."""
        slot = self._slots[k]
        if tensor.nbytes > slot.nbytes:
            slot = self._slot(tensor)
        self._slots[k] = _Slot(slot.offset, slot.nbytes, tensor.shape, tensor.dtype)
        left, place = memoryview(tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)), slot.offset
        while left:
            count = os.pwrite(self._file.fileno(), left, place)
            left, place = left[count:], place + count
