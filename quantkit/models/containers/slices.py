"""Slices: tensors that a safetensors file holds as part of a larger one, such as one expert of all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.models.containers.safetensors_folder import TensorInfo

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Slice(TensorInfo):
    """The part `index` of the stored tensor `source`, which begins at `offset`, for matrices transposed if so
    told. Shape and bytes are the part's own, as it is once read."""

    source: str = ""
    index: Index = ()
    transposed: bool = False


def read(file, info: Slice) -> Tensor:
    """The slice, a view of no more of the `file` (of safetensors' `safe_open`) than it takes."""
    steps = tuple(part for part in info.index if isinstance(part, slice) and part.step)
    if not steps:
        found = file.get_slice(info.source)[info.index]
    else:  # safetensors knows no steps: every second row is picked from all
        dense = tuple(part if part not in steps else slice(None) for part in info.index)
        picked = tuple(
            part if part in steps else slice(None) for part in info.index if isinstance(part, slice)
        )
        found = file.get_slice(info.source)[dense][picked]
    return found.t() if info.transposed else found
