"""Grids: the values a quantized weight may take. Pure tensor maths, one file each, found by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Params = Any  # each grid's own frozen dataclass: exactly the values that will be stored


class Grid(Protocol):
    """How one group of `group_size` neighbouring columns of `W [out, in]` is quantized.

    Error feedback works column by column, so a grid can round a single column of a group, too.
    """

    group_size: int

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> Params:
        """Parameters for groups `weight [rows, group_size]`; `importance` broadcasts to it."""

    def round(self, weight: Tensor, params: Params) -> Tensor:
        """Codes, uint8 `[rows, group_size]`."""

    def round_column(self, column: Tensor, params: Params, j: int) -> tuple[Tensor, Tensor]:
        """Codes (float) and values of column `j` of the group, both `[rows]`."""

    def decode(self, codes: Tensor, params: Params) -> Tensor:
        """Values, float32 `[rows, group_size]`."""

    def scaled(self, params: Params, factor: Tensor) -> Params:
        """Parameters whose values are `factor [rows]` times as large, as nearly as can be stored."""

    def clipped(self, params: Params) -> int:
        """How many parameters lie at the end of what can be stored, where weights may be lost."""

    def join(self, params: Sequence[Params]) -> Params:
        """Parameters of a matrix `[out, groups]` from those of its groups, each of `[out]` rows."""

    def rows(self, params: Params, rows: slice) -> Params:
        """The parameters of some rows of a matrix."""

    def decode_matrix(self, codes: Tensor, params: Params, column_group: Tensor) -> Tensor:
        """Values, float32 `[out, in]`, where column i belongs to group `column_group[i]`."""


@dataclass(frozen=True)
class QuantizedWeight:
    """What a solver returns and a layout encodes.

    codes: uint8 `[out, in]`, columns in the order of the original weight.
    params: the grid's own, for `[out, groups]`.
    column_group: int64 `[in]`, the group of each column; `arange(in) // group_size` unless the
    columns were reordered across groups (desc_act).
    """

    grid: Grid
    codes: Tensor
    params: Params
    column_group: Tensor

    def values(self) -> Tensor:
        """The dequantized weight, float32 `[out, in]`."""
        return self.grid.decode_matrix(self.codes, self.params, self.column_group)
