"""Round to nearest: every weight to its group's nearest value. Data-free; the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.grids import Grid, QuantizedWeight, flat
from quantkit.solvers import SiteStatistics, Solved, clipping


def quantize(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> QuantizedWeight:
    """`weight [out, in]` float32 on `grid`; `importance [in]` weighs the search of the ranges."""
    return nearest(weight, grid, grid.fit_matrix(weight, importance))


def nearest(weight: Tensor, grid: Grid, params: Any) -> QuantizedWeight:
    """`weight [out, in]` rounded to nearest with given parameters `[out, groups]`."""
    codes = grid.round(weight.reshape(-1, grid.group_size), flat(params))
    return QuantizedWeight(grid, codes.view(weight.shape), params)


@dataclass(frozen=True)
class RtnSolver:
    """Round to nearest without any statistics; given LLM.int8's `threshold`, counts outlier columns."""

    threshold: float | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.threshold is None else frozenset({"peak"})

    def solve(
        self, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
    ) -> list[Solved]:
        """Errors are relative to the weights themselves: there are no inputs to weigh them with."""
        solved = []
        outliers = None
        if self.threshold is not None:
            outliers = int((statistics.peak >= self.threshold).sum()) if self.threshold else 0
        for weight, grid in zip(weights, grids, strict=True):
            quantized = quantize(weight, grid)
            error = (quantized.values() - weight).square().sum() / weight.square().sum().clamp(min=1e-30)
            notes = clipping(quantized)
            solved.append(Solved(quantized, error.item(), notes=notes, outlier_columns=outliers))
        return solved
