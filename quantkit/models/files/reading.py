"""Tensors of safetensors files by plain reads, each byte once and none beside.

A mapped file counts as the process's memory, page by page as it is touched, and its whole shard as address
space: under `ulimit -v` a model of a few large shards could not even be opened. What is read here takes the
tensor's own bytes, whatever file they lie in.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models.files.safetensors_folder import COPY_BYTES, TensorInfo

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64, "BOOL": torch.bool,
}  # fmt: skip
Index = tuple[int | slice, ...]


def tensor(info: TensorInfo) -> Tensor:
    """A tensor as it lies in its file. Raises QuantkitError where the file has fewer bytes or torch no such
    type, OSError where it cannot be read."""
    dtype = _dtype(info.name, info.dtype)
    return octets(info.file, info.offset, info.nbytes, info.name).view(dtype).view(info.shape)


def part(whole: TensorInfo, index: Index) -> Tensor:
    """`tensor(whole)[index]`, of which no more is read than lies between its first and its last row."""
    dtype = _dtype(whole.name, whole.dtype)
    start, count, shape, rest = _run(whole.shape, index)
    found = octets(whole.file, whole.offset + start * dtype.itemsize, count * dtype.itemsize, whole.name)
    return found.view(dtype).view(shape)[rest]


def equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors of rows have the same values: rows are read up to the first that differ, and none
    of what lies in one place."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if (one.file, one.offset) == (other.file, other.offset):
        return True
    rows = max(1, COPY_BYTES * one.shape[0] // max(1, one.nbytes))
    pieces = ((slice(first, first + rows),) for first in range(0, one.shape[0], rows))
    return all(torch.equal(part(one, piece), part(other, piece)) for piece in pieces)


def _run(shape: tuple[int, ...], index: Index) -> tuple[int, int, tuple[int, ...], Index]:
    """Where values lie together that hold a part: the first of them, how many, their shape, and the part's
    index in that."""
    start, shape, index = 0, tuple(shape), tuple(index)
    while index and type(index[0]) is int:
        start += index[0] * math.prod(shape[1:])
        shape, index = shape[1:], index[1:]
    if index:
        first, last, step = index[0].indices(shape[0])
        start += first * math.prod(shape[1:])
        shape = (max(0, last - first), *shape[1:])
        index = (slice(None, None, step), *index[1:])
    return start, math.prod(shape), shape, index


def octets(file: Path, offset: int, nbytes: int, name: str) -> Tensor:
    """uint8 `[nbytes]` of a file from `offset` on: every weight that is read passes here. name: of whose
    bytes they are, for the error where there are fewer."""
    found = torch.empty(nbytes, dtype=torch.uint8)
    left = memoryview(found.numpy())
    with open(file, "rb", buffering=0) as source:
        source.seek(offset)
        while left:
            count = source.readinto(left)
            if not count:
                raise QuantkitError(f"{name} ends early in {file}", "download the file again")
            left = left[count:]
    return found


def _dtype(name: str, stored: str) -> torch.dtype:
    if stored not in DTYPES:
        raise QuantkitError(f"{name} is stored as {stored}, which torch has no type for", "convert it first")
    return DTYPES[stored]
