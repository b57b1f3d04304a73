"""Read tensors of safetensors files with plain reads, not memory maps; each byte is read once.

The pages of a mapped file count as the process's memory, and each whole shard as address space: under
`ulimit -v` a model with a few large shards could not even be opened.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, require
from quantkit.grids.fp4 import MX_BLOCK, decode_mxfp4
from quantkit.models.files.safetensors_folder import TensorInfo

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in layouts.DTYPES.items()}
Index = tuple[int | slice, ...]


def tensor(info: TensorInfo, index: Index = ()) -> Tensor:
    """Return a tensor as it is stored, or its part `[index]`, for which only the bytes from the first to the
    last row are read. Raises QuantkitError if the file is too short or torch lacks the dtype, OSError if the
    file cannot be read."""
    what = f"{info.name} is stored as {info.dtype}, a type that torch lacks"
    require(info.dtype in DTYPES, what, "convert it first")
    dtype = DTYPES[info.dtype]
    start, count, shape, rest = _run(info.shape, index)
    data = octets(info.file, info.offset + start * dtype.itemsize, count * dtype.itemsize, info.name)
    return data.view(dtype).view(shape)[rest]


def _run(shape: tuple[int, ...], index: Index) -> tuple[int, int, tuple[int, ...], Index]:
    """Return the smallest contiguous range of values that holds a part: first value, number of values, their
    shape, and the part's index inside."""
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
    """Return `nbytes` bytes of a file from `offset` on, uint8; every weight is read by this function. name:
    of the tensor, for the error if the file is too short."""
    data = torch.empty(nbytes, dtype=torch.uint8)
    left = memoryview(data.numpy())
    with open(file, "rb", buffering=0) as source:
        source.seek(offset)
        while left:
            count = source.readinto(left)
            require(count, f"{name} ends early in {file}", "download the file again")
            left = left[count:]
    return data


# ---- tensors that a file holds as part of a larger one, or in blocks of codes


@dataclass(frozen=True)
class Computed(TensorInfo):
    """A tensor that is computed when it is read. values: returns it; called with an index, a part of it, if
    it has parts. whole: the tensor of the checkpoint of which it is a slice; None: of none."""

    values: Callable[..., Tensor]
    whole: TensorInfo | None = None


def read(info: TensorInfo, index: Index = ()) -> Tensor:
    """Return the values of a stored or computed tensor, or of its part `[index]`."""
    if not isinstance(info, Computed):
        return tensor(info, index)
    return info.values(index) if index else info.values()


def of_mxfp4(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors with a decoded `X` for each pair of `X_blocks` and `X_scales`. Raises
    QuantkitError if the shapes do not fit, or if there is no pair."""
    decoded = dict(infos)
    for name in [name for name in infos if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = decoded.pop(name), decoded.pop(f"{base}_scales", None)
        fits = scales and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, MX_BLOCK // 2)
        shape = list(scales.shape) if scales else "absent"
        what = f"{name} is {blocks.dtype} {list(blocks.shape)}, {base}_scales {shape}"
        require(fits and {blocks.dtype, scales.dtype} == {"U8"}, what, "download it again")
        experts, rows, groups, _ = blocks.shape
        shape = experts, groups * MX_BLOCK, rows
        nbytes = 4 * blocks.nbytes  # a byte has two codes, a decoded value two bytes
        values = partial(_decoded, blocks, scales)
        decoded[base] = Computed(base, "BF16", shape, blocks.file, blocks.offset, nbytes, values)
    what = "config.json says mxfp4, and there are no tensors …_blocks"
    require(decoded != infos, what, "download it again", UNSUPPORTED)
    return decoded


def _decoded(blocks: TensorInfo, scales: TensorInfo, index: Index = ()) -> Tensor:
    """Return MXFP4 experts in bfloat16, `[experts, in, out]` as in transformers, or some outputs of one
    expert. blocks: `[experts, out, groups, 16]`; scales: `[experts, out, groups]`."""
    if not index:
        experts = range(blocks.shape[0])
        return torch.stack([_decoded(blocks, scales, (expert, slice(None))) for expert in experts])
    expert, *_, outputs = index
    return decode_mxfp4(tensor(blocks, (expert, outputs)), tensor(scales, (expert, outputs))).t()


def stacked(infos: Mapping[str, TensorInfo], stacks: Mapping[str, Sequence[str]]) -> dict[str, TensorInfo]:
    """Return the tensors with each of the stacks in place of its parts, by name."""
    tensors = dict(infos)
    for name, parts in stacks.items():
        each = [tensors.pop(part) for part in parts]
        first, shape, nbytes = each[0], (len(each), *each[0].shape), len(each) * each[0].nbytes
        values = partial(lambda each: torch.stack(list(map(read, each))), each)
        tensors[name] = Computed(name, first.dtype, shape, first.file, 0, nbytes, values)
    return tensors
