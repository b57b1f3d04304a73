"""Refine for a loss with curvature on both sides, `tr(G E H Eᵀ)`.

With `R = G E H`, the loss along one weight is least if `ŵ_oj` grows by `R_oj / (G_oo H_jj)`. Rows depend on
each other. The rows of a block are visited together, column by column, and share kernel launches; in each
column only moves that lower the loss together are made. No visit raises the loss.
"""

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, each_of, select
from quantkit.grids.grid import rows as rows_of
from quantkit.grids.levels import NO_STEP
from quantkit.quantize.solvers.columns import RUN, Chosen, best_factor, values_of

DESCENT_ROWS = 128  # rows visited together


def refine(chosen: Chosen, grid: Grid, hessian: Tensor, curvature: Tensor, cycles: int) -> None:
    """Improve codes and parameters in place, with the same grid and number of bytes.

    hessian: `[in, in]`, curvature: `[out, out]`; both damped, in the order of the codes, and changed in
    place. cycles: visits of each weight.
    """
    inputs, outputs = hessian.diagonal().clone(), curvature.diagonal().clone()
    hessian.div_(inputs[:, None])  # row j gives the moves of column j
    curvature.div_(outputs[:, None])  # row o gives the moves of row o of W
    for _ in range(cycles):
        for start in range(0, len(outputs), DESCENT_ROWS):
            rows = slice(start, start + DESCENT_ROWS)
            _Visit(chosen, grid, hessian, inputs, curvature[rows], outputs[rows], rows).improve()


class _Visit:
    """A block of rows of W; all tensors are `[columns, rows]`, like codes.

    hessian: divided by `inputs`, its diagonal. curvature `[rows, out]`: divided by `outputs [rows]`.
    """

    def __init__(
        self, chosen: Chosen, grid: Grid, hessian: Tensor, inputs: Tensor,
        curvature: Tensor, outputs: Tensor, rows: slice,
    ):  # fmt: skip
        self.chosen, self.grid, self.rows = chosen, grid, rows
        self.hessian, self.inputs, self.outputs = hessian, inputs, outputs
        # effect of all rows' errors on a row's loss: Σ_p G_op E_p / G_oo
        self.lost = chosen.E @ curvature.t()
        self.within = curvature[:, rows].contiguous()
        self.others = self.within.clone()
        self.others.fill_diagonal_(0)

    def improve(self) -> None:
        size = self.grid.group_size
        for k, params in enumerate(self.chosen.params):
            params = rows_of(params, self.rows)
            each_of(Tensor.copy_, params, self._group(slice(k * size, (k + 1) * size), params))

    def _group(self, columns: slice, params: Any) -> Any:
        """Choose a group's codes and parameters again, and return the parameters, `[rows]`."""
        grid, chosen = self.grid, self.chosen
        hessian = self.hessian[columns, columns]
        residual = self.hessian[columns] @ self.lost  # R / (G_oo H_jj)
        levels = grid.levels(chosen.codes[columns, self.rows])
        moved = torch.empty_like(residual)
        low = 0
        for step in grid.steps(params)[0]:
            alive = step < NO_STEP
            step = torch.where(alive, step, 1.0)
            others = self.others * (step / step[:, None])  # in steps
            weight = self.outputs * step.square()
            end = low + grid.sub_size
            while low < end:
                run = slice(low, min(low + RUN, end))
                ideal = residual[run] / step * alive
                moved[run] = _descend(grid, hessian[run, run], ideal, levels[run], others, weight) * step
                residual.addmm_(hessian[:, run], moved[run] @ self.within.t(), alpha=-1)
                low = run.stop
        params, change = self._rescaled(levels, params, hessian, self.inputs[columns], residual)
        moved += change
        codes = torch.empty(levels.shape, dtype=torch.uint8, device=levels.device)
        grid.codes(levels, codes)
        chosen.codes[columns, self.rows] = codes
        chosen.E[columns, self.rows] -= moved
        self.lost[columns] -= moved @ self.within.t()
        return params

    def _rescaled(
        self, levels: Tensor, params: Any, hessian: Tensor, inputs: Tensor, residual: Tensor
    ) -> tuple[Any, Tensor]:
        """Return parameters with the best common factor for each row's values, and the change of values."""
        values = values_of(levels, *self.grid.steps(params))
        along = torch.mv((residual * values).t(), inputs)
        power = torch.mv((values * (hessian @ values)).t(), inputs)
        scaled = self.grid.scaled(params, best_factor(along, power))
        change = values_of(levels, *self.grid.steps(scaled)).sub_(values)
        weighed = inputs[:, None] * (hessian @ change)
        loss = (change * (weighed - 2 * inputs[:, None] * residual)).sum(0)
        cross = self.others * (change.t() @ weighed)
        keep = loss + cross.sum(1) < 0
        together = torch.dot(self.outputs * keep, loss + torch.mv(cross, keep.float()))
        keep &= together <= 0
        return select(keep, scaled, params), change * keep


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
