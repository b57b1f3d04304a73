"""Tensors that a safetensors file holds otherwise: as part of a larger one, such as one expert of all, or in
blocks of codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.layouts._mxfp4 import BLOCK, decode
from quantkit.models.files import reading
from quantkit.models.files.reading import Index
from quantkit.models.files.safetensors_folder import TensorInfo


@dataclass(frozen=True)
class Mxfp4(TensorInfo):
    """Experts in MXFP4 as the values they stand for, bfloat16 `[experts, in, out]` as transformers has them:
    `blocks [experts, out, groups, 16]` and `scales [experts, out, groups]`."""

    blocks: TensorInfo
    scales: TensorInfo

    def rows(self, expert: int, outputs: slice) -> Tensor:
        """`[out, in]` of one expert, of these outputs."""
        return decode(
            reading.part(self.blocks, (expert, outputs)), reading.part(self.scales, (expert, outputs))
        )


def of_mxfp4(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with `X` for each `X_blocks` and `X_scales`. Raises QuantkitError for
    those that do not go together, and for none."""
    found = dict(infos)
    for name in [name for name in infos if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = found.pop(name), found.pop(f"{base}_scales", None)
        fits = scales and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            shape = list(scales.shape) if scales else "absent"
            raise QuantkitError(
                f"{name} is {blocks.dtype} {list(blocks.shape)}, {base}_scales {shape}", "download it again"
            )
        experts, rows, groups, _ = blocks.shape
        shape = experts, groups * BLOCK, rows
        nbytes = 4 * blocks.nbytes  # two codes a byte, two bytes a value
        found[base] = Mxfp4(base, "BF16", shape, blocks.file, blocks.offset, nbytes, blocks, scales)
    if found == infos:
        raise QuantkitError(
            "config.json says mxfp4, and there are no tensors …_blocks", "download it again", UNSUPPORTED
        )
    return found


@dataclass(frozen=True)
class Slice(TensorInfo):
    """The part `index` of the stored tensor `source`, which begins at `offset`, for matrices transposed if so
    told. Shape and bytes are the part's own, as it is once read. whole: the source's shape; packed: how it is
    coded."""

    source: str = ""
    index: Index = ()
    transposed: bool = False
    packed: Mxfp4 | None = None
    whole: tuple[int, ...] = ()


def read(info: Slice | Mxfp4) -> Tensor:
    """Its values, for which no more is read than lies together."""
    if isinstance(info, Mxfp4):
        return torch.stack([info.rows(expert, slice(None)).t() for expert in range(info.shape[0])])
    if info.packed:
        expert, *_, outputs = info.index
        return info.packed.rows(expert, outputs)
    source = TensorInfo(info.source, info.dtype, info.whole, info.file, info.offset, 0)
    found = reading.part(source, info.index)
    return found.t() if info.transposed else found


OTHERWISE = Slice, Mxfp4  # kinds of tensors that `read` reads
