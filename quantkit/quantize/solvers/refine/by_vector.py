"""Refine columns of a code book, a vector at a time: choose the code vector nearest to `ŵ_v + H_vv⁻¹ R_v` in
the metric H_vv. Each sub-block's scale is chosen after its vectors, the group's scale last. No step raises a
row's loss."""

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.quantize.solvers.columns import Chosen, best_factor


def refine(chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int) -> None:
    """Improve codes and parameters in place; see `refine` in `__init__.py`. hessian: `[in, in]`, damped."""
    for _ in range(cycles):
        for k in range(len(chosen.params)):
            _Visit(chosen, grid, hessian, k).improve()


class _Visit:
    """One group: levels `[group_size, out]`, errors E and `residual = H E`, all changed in place."""

    def __init__(self, chosen: Chosen, grid: Grid, hessian: Tensor, k: int):
        self.grid, self.chosen, self.k = grid, chosen, k
        group = slice(k * grid.group_size, (k + 1) * grid.group_size)
        self.hessian, self.E, self.codes = hessian[group, group], chosen.E[group], chosen.codes[group]
        self.residual = hessian[group] @ chosen.E
        self.levels = grid.levels(self.codes)

    def improve(self) -> None:
        """Improve vectors and scale of every sub-block, then the scale of the group."""
        grid, params = self.grid, self.chosen.params[self.k]
        for b, low in enumerate(range(0, grid.group_size, grid.sub_size)):
            columns = slice(low, low + grid.sub_size)
            step = grid.steps(params)[0][b]
            self._choose(columns, step)
            better = grid.rescaled(params, b, self._factor(columns, self.levels[columns] * step))
            params = self._rescale(columns, params, better)
        whole = slice(0, grid.group_size)
        better = grid.scaled(params, self._factor(whole, self.levels * self._steps(params)))
        self.chosen.params[self.k] = self._rescale(whole, params, better)
        grid.codes(self.levels, self.codes)

    def _choose(self, columns: slice, step: Tensor) -> None:
        """Choose the vectors of a sub-block again."""
        for low in range(columns.start, columns.stop, self.grid.vector_size):
            v = slice(low, low + self.grid.vector_size)
            metric, old = self.hessian[v, v], self.levels[v]
            ideal = torch.linalg.solve(metric, self.residual[v]).div_(step).add_(old)
            nearest = self.grid.search_in(metric).nearest(ideal, old)
            self._move(v, (nearest - old).mul_(step))
            self.levels[v] = nearest

    def _factor(self, columns: slice, values: Tensor) -> Tensor:
        """Return the best common factor of `values` in these columns, `[out]`."""
        power = (self.hessian[columns, columns] @ values).mul_(values).sum(0)
        return best_factor((self.residual[columns] * values).sum(0), power)

    def _rescale(self, columns: slice, params: Any, better: Any) -> Any:
        """Return `better` in the rows where it lowers the loss of the same levels, else `params`."""
        moved = self.levels[columns] * (self._steps(better) - self._steps(params))[columns]
        keep = self._change(columns, moved) < 0
        self._move(columns, moved.mul_(keep))
        return select(keep, better, params)

    def _steps(self, params: Any) -> Tensor:
        """Return the step of every column, `[group_size, out]`."""
        return self.grid.steps(params)[0].repeat_interleave(self.grid.sub_size, 0)

    def _change(self, columns: slice, moved: Tensor) -> Tensor:
        """Return the change of the loss, `[out]`, if the values of these columns change by `moved`."""
        gained = (self.hessian[columns, columns] @ moved).sub_(self.residual[columns], alpha=2)
        return gained.mul_(moved).sum(0)

    def _move(self, columns: slice, moved: Tensor) -> None:
        self.chosen.lost += self._change(columns, moved)
        self.E[columns] -= moved
        self.residual -= self.hessian[:, columns] @ moved
