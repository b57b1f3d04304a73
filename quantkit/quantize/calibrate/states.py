"""Hidden states of all tokens between two blocks, batch by batch."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from quantkit.models.machine.device import Lane, free_memory, host_buffer, is_accelerator, to_host
from quantkit.models.skeleton import Skeleton

SHARE = 0.25  # of an accelerator's free memory that states may take without a plan


@dataclass(frozen=True)
class Place:
    """The place where hidden states are kept: `device`, `host`, or `disk` in a file of `folder`."""

    where: str = "device"
    folder: Path | None = None


HERE = Place()


class States:
    """Batches of hidden states `[batch, tokens, hidden]`, or of flow, used on `device` and kept there, on the
    host or in a file. home: the device that keeps them.

    On the host, a batch is copied back while the next is computed, and the next is copied ahead while the
    current is used. Reading a batch returns a tensor on `device`.
    """

    def __init__(self, batches: Iterable[Tensor], device: torch.device, place: Place = HERE):
        on_host = place.where == "host" and is_accelerator(device)
        self.home = torch.device("cpu") if on_host or place.where == "disk" else device
        self._device = device
        self._lane = Lane(device) if on_host else None
        self._sent: dict[int, Tensor] = {}  # on their way to the device
        self._here: dict[int, Tensor] = {}  # the one that was read last
        self._kept: list[Tensor] | Spill = Spill(place.folder) if place.where == "disk" else []
        for hidden in batches:
            self._kept.append(to_host(hidden, wait=False) if on_host else hidden)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, k: int) -> Tensor:
        if k not in self._here:
            self._here = {}  # before another takes its place
            self._here = {k: self._fetched(k)}
        return self._here[k]

    def _fetched(self, k: int) -> Tensor:
        if self._lane is None:
            return self._kept[k].to(self._device)
        sent = self._sent.pop(k, None)
        hidden = self._lane.receive(self._lane.send(self._kept[k]) if sent is None else sent)
        ahead = k + 1
        self._sent = {ahead: self._lane.send(self._kept[ahead])} if ahead < len(self) else {}
        return hidden

    def __setitem__(self, k: int, hidden: Tensor) -> None:
        self._here.pop(k, None)
        self._sent.pop(k, None)
        if self._lane is None:
            self._kept[k] = hidden
            return
        if hidden.shape != self._kept[k].shape:  # blocks also pass other tensors
            self._kept[k] = host_buffer(hidden)
        self._kept[k].copy_(hidden, non_blocking=True)

    def move_to_host(self) -> None:
        """Keep all batches in host memory from now on, unless they are in a file."""
        if self._lane is None and self.home == self._device:
            self.home, self._lane, self._here = torch.device("cpu"), Lane(self._device), {}
            for k, hidden in enumerate(self._kept):
                self._kept[k] = to_host(hidden, wait=False)

    def advance(self, outputs: Iterable[Tensor]) -> None:
        """Replace the batches by a block's outputs, one by one."""
        for k, hidden in zip(range(len(self)), outputs, strict=True):
            self[k] = hidden

    def __iter__(self) -> Iterator[Tensor]:
        return (self[k] for k in range(len(self)))


def embedded(skeleton: Skeleton, ids: Sequence[Tensor], place: Place | None = None) -> States:
    """Return the inputs of the first block for batches of `ids`. place: where to keep them; None: the device
    if they fit, else the host."""
    entering, device = map(skeleton.embed, ids), skeleton.device
    if place is None:
        first = next(entering)
        crowded = is_accelerator(device) and first.nbytes * len(ids) > SHARE * free_memory(device)
        place, entering = Place("host") if crowded else HERE, chain([first], entering)
    return States(entering, device, place)


class Spill:
    """Numbered tensors in an unnamed file of `folder`, so that nothing is left even if the process is killed.

    The file is not memory-mapped, because mapped pages would count as the process's memory.
    """

    def __init__(self, folder: Path):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        self._file = tempfile.TemporaryFile(dir=existing)
        self._slots: list[tuple[int, int, torch.Size, torch.dtype]] = []  # offset, bytes, shape, dtype
        self._end = 0

    def __len__(self) -> int:
        return len(self._slots)

    def append(self, tensor: Tensor) -> None:
        """Add a tensor after the last one."""
        self._slots.append((0, -1, tensor.shape, tensor.dtype))
        self[len(self) - 1] = tensor

    def __getitem__(self, k: int) -> Tensor:
        """Return a copy of tensor k on the host."""
        offset, _, shape, dtype = self._slots[k]
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(offset)
        self._file.readinto(_bytes(tensor))
        return tensor

    def __setitem__(self, k: int, tensor: Tensor) -> None:
        """Replace tensor k by one of any shape; a larger one is written at the end of the file."""
        offset, room, *_ = self._slots[k]
        if tensor.nbytes > room:
            offset, room = self._end, tensor.nbytes
            self._end += room
        self._slots[k] = offset, room, tensor.shape, tensor.dtype
        self._file.seek(offset)
        self._file.write(_bytes(tensor.cpu()))
        self._file.flush()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
