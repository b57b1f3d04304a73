"""Tensors that wait in a file instead of in memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


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
