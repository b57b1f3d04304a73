"""A GGUF file whose linears stay in their blocks of codes, as packed linears of any other layout do.

`GgufCheckpoint` decodes what it reads; here `parts` gives a linear's blocks, rows in the model's order,
and `placed` says what lies where in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from quantkit.grids.ggml import TYPES
from quantkit.layouts.ggml import GgmlLayout
from quantkit.models.files import reading
from quantkit.models.gguf.checkpoint import GgufCheckpoint
from quantkit.models.gguf.file_types import SCALED
from quantkit.models.skeleton.loading import TORCH_DTYPES


@dataclass(frozen=True)
class CodedGguf(GgufCheckpoint):
    """Its `layout` is ggml's, where any of the `linears` it was made with can be decoded here."""

    @staticmethod
    def of(checkpoint: GgufCheckpoint, linears: Collection[str]) -> CodedGguf:
        """linears: names of those that may stay packed; those of types without a grid here or with a scale of
        their own, and those that the file holds in several pieces, are decoded all the same."""
        kept = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
        infos = {name: checkpoint.infos.get(f"{name}.weight") for name in linears}
        packed = {
            name: {GgmlLayout.marker: info.name}
            for name, info in infos.items()
            if info is not None
            and info.dtype in TYPES
            and info.dtype not in SCALED
            and info.name not in checkpoint.pieces
        }
        return CodedGguf(**kept | {"layout": GgmlLayout(), "_quantized": packed})

    def parts(self, name: str) -> dict[str, Tensor]:
        """Blocks `[out, row_bytes]` of a packed linear (`X.weight`), and the number of their type."""
        info, target = self.infos[name], self.targets[name]
        raw = reading.octets(info.file, info.offset, info.nbytes, info.name)
        rows = target.to_hf(raw.view(target.shape[-2], -1))
        number = torch.tensor(GGMLQuantizationType[info.dtype].value, dtype=torch.int32)
        return {"ggml": rows.contiguous(), "ggml_type": number}

    def placed(self, name: str, tensor: Tensor) -> tuple[int, bytes]:
        """Where in the file `X.weight` lies and its bytes, of blocks as `parts` has them; or of a vector, of
        its values."""
        info, target = self.infos[name], self.targets[name]
        moved = target.to_gguf(tensor)
        if tensor.dtype != torch.uint8:
            moved = moved.to(TORCH_DTYPES[info.dtype])
        data = moved.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(data) == info.nbytes, f"{name}: {len(data)} bytes for {info.nbytes}"
        return info.offset, data
