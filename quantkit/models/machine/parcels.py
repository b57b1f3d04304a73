"""Values on their way to another process of ours: pickled but for their tensors, which travel as they are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Kind = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype and type of device


def packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """Its bytes, and the tensors that go beside them."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, torch.Tensor):
                return None
            tensors.append(part)
            return len(tensors) - 1

    buffer = io.BytesIO()
    Pickler(buffer, protocol=5).dump(value)
    kinds = [(tuple(part.shape), part.dtype, part.device.type) for part in tensors]
    return pickle.dumps((kinds, buffer.getvalue())), tensors


def kinds_of(parcel: bytes) -> list[Kind]:
    """What tensors go beside it."""
    return pickle.loads(parcel)[0]


def unpacked(parcel: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value, with its tensors where they were."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(pickle.loads(parcel)[1])).load()
