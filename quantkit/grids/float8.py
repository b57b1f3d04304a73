"""8-bit floats (e4m3, OCP 8-bit floating point specification): read, not fitted.

`w = scale * float8(code)`; codes are the bytes themselves, one scale per group of columns (a whole row, or
the columns of a block), repeated over the rows that share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.grid import Grid


@dataclass(frozen=True)
class Float8Params:
    """scale: float32, `[rows]` for one group or `[out, groups]` for a matrix."""

    scale: Tensor


@dataclass(frozen=True)
class Float8Grid(Grid):
    """The 254 finite values of e4m3 times a scale."""

    group_size: int
    bits = 8

    def decode(self, codes: Tensor, params: Float8Params) -> Tensor:
        """Values, float32 `[rows, group_size]`, of bytes `[rows, group_size]`."""
        return codes.view(torch.float8_e4m3fn).float() * params.scale[:, None]

    def describe(self) -> str:
        """`float8 e4m3, groups of 768`."""
        return f"float8 e4m3, groups of {self.group_size}"
