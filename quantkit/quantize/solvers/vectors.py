"""The columns of GPTQ's sweep for code books, which choose several columns together.

With H = U D Uᵀ, choosing a vector v of columns after errors e costs the loss `|(e_v U_vv + s) D_v^½|²` with
`s = Σ_{k<v} e_k U_kv`. That is the squared distance, in the metric `M = U_vv D_v U_vvᵀ`, between the chosen
values and `w_v + s U_vv⁻¹`. So the nearest vector of the code book in this metric is chosen; later columns
compensate for its error as for any other column's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.quantize.solvers.columns import Chosen, Columns

REACH = 2  # scales on either side of the fitted one that are tried; 1 loses 1 to 3 percent more


class Vectors(Columns):
    """Columns of a grid whose codes stand for vectors of several columns."""

    def choose(self, group: slice, params: Any, refit: bool) -> Any:
        """Choose the codes of a group's columns; return its parameters. Each sub-block gets, of the scales
        around the fitted one, the scale with the least loss, given the errors of earlier columns."""
        grid, size = self.grid, self.grid.sub_size
        for k, low in enumerate(range(group.start, group.stop, size)):
            part = slice(low, low + size)
            self.update(part)
            candidates = grid.neighbouring(params, k, REACH if refit else 0)
            steps = torch.stack([grid.steps(each)[0][k] for each in candidates])  # [candidates, out]
            levels, E, lost = self._swept(part, steps)
            best = lost.argmin(0)
            params = grid.chosen(candidates, best)
            index = best.expand(1, size, -1)
            levels, E = (x.gather(0, index)[0] for x in (levels, E))
            self.E[part] = E
            self.lost += lost.gather(0, best[None])[0]
            self.grid.codes(levels, self.codes[part])
        return params

    def _swept(self, part: slice, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return levels and errors `[candidates, columns, out]` for each of `steps`, and the losses."""
        count, rows = steps.shape
        W, fed = self.Wt[part], self.E[part]
        levels = W.new_empty(len(W), count, rows)
        E, lost = torch.empty_like(levels), torch.zeros_like(steps)
        U, D = self.U[part, part], self.D[part]
        size = self.grid.vector_size
        for low in range(0, len(W), size):
            v = slice(low, low + size)
            own = U[v, v]
            s = fed[v, None].expand(-1, count, -1)
            if low:
                s = s + (U[:low, v].t() @ E[:low].flatten(1)).view(size, count, rows)
            identity = torch.eye(size, device=own.device)
            inverse = torch.linalg.solve_triangular(own, identity, upper=True, unitriangular=True)
            target = (inverse.t() @ s.flatten(1)).view(size, count, rows).add_(W[v, None])
            search = self.grid.search_in(own * D[v] @ own.t())
            y = (target / steps).flatten(1)
            found = search.nearest(y)
            levels[v] = found.view(size, count, rows)
            E[v] = W[v, None] - levels[v] * steps
            lost += search.cost(y - found).view(count, rows) * steps.square()
        return levels.transpose(0, 1), E.transpose(0, 1), lost


def refine(Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int) -> None:
    """Improve codes and parameters like refine.refine, but a vector at a time: the nearest to
    `ŵ_v + H_vv⁻¹ r_v` in the metric H_vv, then the sub-block's scale, then the group's. No step raises a
    row's loss. hessian: `[in, in]`, damped."""
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
            part = slice(low, low + grid.sub_size)
            step = grid.steps(params)[0][b]
            self._choose(part, step)
            better = grid.with_step(params, b, step * self._factor(part, self.levels[part] * step))
            params = self._rescale(part, params, better)
        every = slice(0, grid.group_size)
        better = grid.scaled(params, self._factor(every, self.levels * self._steps(params)))
        self.chosen.params[self.k] = self._rescale(every, params, better)
        grid.codes(self.levels, self.codes)

    def _choose(self, part: slice, step: Tensor) -> None:
        """Choose the vectors of a sub-block again."""
        for low in range(part.start, part.stop, self.grid.vector_size):
            v = slice(low, low + self.grid.vector_size)
            own, old = self.hessian[v, v], self.levels[v]
            ideal = torch.linalg.solve(own, self.residual[v]).div_(step).add_(old)
            found = self.grid.search_in(own).nearest(ideal, old)
            self._move(v, (found - old).mul_(step))
            self.levels[v] = found

    def _factor(self, part: slice, values: Tensor) -> Tensor:
        """Return the best common factor of `values` in these columns, `[out]`."""
        power = (self.hessian[part, part] @ values).mul_(values).sum(0)
        factor = 1 + (self.residual[part] * values).sum(0) / power
        return torch.where((power > 0) & (factor > 0), factor, 1.0)

    def _rescale(self, part: slice, params: Any, better: Any) -> Any:
        """Return `params`, or `better` in the rows where the same levels have a lower loss with it."""
        moved = self.levels[part] * (self._steps(better) - self._steps(params))[part]
        keep = self._change(part, moved) < 0
        self._move(part, moved.mul_(keep))
        return select(keep, better, params)

    def _steps(self, params: Any) -> Tensor:
        """Return the step of every column, `[group_size, out]`."""
        return self.grid.steps(params)[0].repeat_interleave(self.grid.sub_size, 0)

    def _change(self, part: slice, moved: Tensor) -> Tensor:
        """Return the change of the loss, `[out]`, if the values of these columns change by `moved`."""
        return (self.hessian[part, part] @ moved).sub_(self.residual[part], alpha=2).mul_(moved).sum(0)

    def _move(self, part: slice, moved: Tensor) -> None:
        self.chosen.lost += self._change(part, moved)
        self.E[part] -= moved
        self.residual -= self.hessian[:, part] @ moved
