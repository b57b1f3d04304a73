"""Coordinate descent on codes and scales for a loss with curvature on both sides, `tr(G E H Eᵀ)`.

With `R = G E H`, the loss along one weight is least if `ŵ_oj` grows by `R_oj / (G_oo H_jj)`. As in
`refine.py`, every weight moves to the nearest grid value, and a group's values get their best common factor.
Here rows depend on each other. The rows of a block are visited together, column by column, and share kernel
launches; in each column only moves that lower the loss together are made. No visit raises the loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.grids.grid import rows as rows_of
from quantkit.grids.levels import NO_STEP
from quantkit.quantize.solvers.columns import RUN, Chosen

DESCENT_ROWS = 128  # that are visited together
TINY = torch.finfo(torch.float32).tiny


class Descent:
    """Improves the choice `chosen` for `Wt [in, out]` in place, with the same grid and number of bytes.

    hessian: `[in, in]`, curvature: `[out, out]`; both damped, in the order of Wt, and changed in place.
    """

    def __init__(self, Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, curvature: Tensor):
        self.Wt, self.chosen, self.grid = Wt, chosen, grid
        self.inputs, self.outputs = hessian.diagonal().clone(), curvature.diagonal().clone()
        self.hessian = hessian.div_(self.inputs[:, None])  # row j is what column j goes by
        self.curvature = curvature.div_(self.outputs[:, None])  # row o is what row o of W goes by

    def cycle(self) -> None:
        """Visit every weight once."""
        for start in range(0, self.Wt.shape[1], DESCENT_ROWS):
            _Rows(self, slice(start, start + DESCENT_ROWS)).visit()


class _Rows:
    """A block of rows of W; all tensors are `[columns, rows]`, like Wt."""

    def __init__(self, by: Descent, rows: slice):
        self.by, self.rows, self.grid = by, rows, by.grid
        # effect of all rows' errors on a row's loss: Σ_p G_op E_p / G_oo
        self.lost = by.chosen.E @ by.curvature[rows].t()
        self.own = by.curvature[rows, rows].contiguous()
        self.others = self.own.clone()
        self.others.fill_diagonal_(0)
        self.outputs = by.outputs[rows]

    def visit(self) -> None:
        """Improve all groups, one after another."""
        params, size = self.by.chosen.params, self.grid.group_size
        for k, whole in enumerate(params):
            found = self._group(slice(k * size, (k + 1) * size), rows_of(whole, self.rows))
            put(whole, found, self.rows)

    def _group(self, columns: slice, params: Any) -> Any:
        """Choose a group's codes and parameters again, and return the parameters, `[rows]`."""
        by, grid, chosen = self.by, self.grid, self.by.chosen
        hessian = by.hessian[columns, columns]
        residual = by.hessian[columns] @ self.lost  # R / (G_oo H_jj)
        levels = grid.levels(chosen.codes[columns, self.rows])
        moved = torch.empty_like(residual)
        low = 0
        for step in grid.steps(params)[0]:
            alive = step < NO_STEP
            step = torch.where(alive, step, 1.0)
            others = self.others * (step / step[:, None])  # of what is counted in steps
            weight = self.outputs * step.square()
            end = low + grid.sub_size
            while low < end:
                run = slice(low, min(low + RUN, end))
                ideal = residual[run] / step * alive
                moved[run] = _descend(grid, hessian[run, run], ideal, levels[run], others, weight) * step
                residual.addmm_(hessian[:, run], moved[run] @ self.own.t(), alpha=-1)
                low = run.stop
        params, change = self._rescaled(levels, params, hessian, by.inputs[columns], residual)
        moved += change
        codes = torch.empty(levels.shape, dtype=torch.uint8, device=levels.device)
        grid.codes(levels, codes)
        chosen.codes[columns, self.rows] = codes
        chosen.E[columns, self.rows] -= moved
        self.lost[columns] -= moved @ self.own.t()
        return params

    def _rescaled(
        self, levels: Tensor, params: Any, hessian: Tensor, inputs: Tensor, residual: Tensor
    ) -> tuple[Any, Tensor]:
        """Return parameters with the best common factor for each row's values, and the change of values."""
        values = self._values(levels, params)
        along = torch.mv((residual * values).t(), inputs)
        power = torch.mv((values * (hessian @ values)).t(), inputs)
        factor = 1 + along / power.clamp(min=TINY)
        factor = torch.where((power > 0) & (factor > 0), factor, 1.0)
        scaled = self.grid.scaled(params, factor)
        change = self._values(levels, scaled).sub_(values)
        weighed = inputs[:, None] * (hessian @ change)
        loss = (change * (weighed - 2 * inputs[:, None] * residual)).sum(0)
        cross = self.others * (change.t() @ weighed)
        keep = loss + cross.sum(1) < 0
        together = torch.dot(self.outputs * keep, loss + torch.mv(cross, keep.float()))
        keep &= together <= 0
        return select(keep, scaled, params), change * keep

    def _values(self, levels: Tensor, params: Any) -> Tensor:
        steps, lows = self.grid.steps(params)
        values = levels.unflatten(0, (-1, self.grid.sub_size)) * steps[:, None]
        return values.sub_(lows[:, None]).flatten(0, 1)


def _descend(
    grid: Grid, hessian: Tensor, ideal: Tensor, levels: Tensor, others: Tensor, weight: Tensor
) -> Tensor:
    """Choose the columns of a run again, one after another; return their moves in levels, `[run, rows]`.

    ideal: the best moves without rounding, `[run, rows]`. levels: `[run, rows]`. Both change in place.
    others: effect of one row's move on another row, `[rows, rows]`, diagonal 0. weight: of a row's loss.
    """
    moved, shifted = torch.zeros_like(ideal), torch.zeros_like(ideal)
    target = torch.empty_like(weight)
    for j, (want, level, move, shift) in enumerate(zip(ideal, levels, moved, shifted, strict=True)):
        if j:
            want.addmv_(shifted[:j].t(), hessian[j, :j], alpha=-1)
        grid.snap(level + want, target)
        torch.sub(target, level, out=move)
        alone = move.sub(want, alpha=2)  # times the move: its loss if no other row moved
        move.mul_((torch.mv(others, move).add_(alone).mul_(move)) < 0)
        torch.mv(others, move, out=shift)
        pays = torch.dot(alone.add_(shift).mul_(move), weight) <= 0  # or no row moves
        level.add_(move.mul_(pays))
        shift.mul_(pays).add_(move)
    return moved


def put(whole: Any, part: Any, rows: slice) -> None:
    """Replace the parameters of some rows of a group, in place."""
    for field in dataclasses.fields(whole):
        getattr(whole, field.name)[rows] = getattr(part, field.name)
