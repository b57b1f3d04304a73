"""Round to nearest: every weight to its group's nearest value. Data-free; the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids import Grid, QuantizedWeight
from quantkit.solvers import Solved, clipping


def quantize(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> QuantizedWeight:
    """`weight [out, in]` float32 on `grid`, group by group; `importance [in]` weighs the range search."""
    out_features, in_features = weight.shape
    columns = torch.arange(in_features, device=weight.device)
    starts = range(0, in_features, grid.group_size)
    params, codes = [], torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in starts:
        group = slice(start, start + grid.group_size)
        params.append(grid.fit(weight[:, group], None if importance is None else importance[group]))
        codes[:, group] = grid.round(weight[:, group], params[-1])
    return QuantizedWeight(grid, codes, grid.join(params), columns // grid.group_size)


@dataclass(frozen=True)
class RtnSolver:
    """Round to nearest without any statistics."""

    needs_statistics = False

    def solve(self, weights: Sequence[Tensor], grids: Sequence[Grid], hessian: Tensor | None) -> list[Solved]:
        """Errors are relative to the weights themselves: there are no inputs to weigh them with."""
        solved = []
        for weight, grid in zip(weights, grids, strict=True):
            quantized = quantize(weight, grid)
            error = (quantized.values() - weight).square().sum() / weight.square().sum().clamp(min=1e-30)
            solved.append(Solved(quantized, error.item(), notes=clipping(quantized)))
        return solved
