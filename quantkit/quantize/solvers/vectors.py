"""The columns of GPTQ's sweep where several are chosen together, from a code book.

Of a vector v of columns that follows errors e, with H = U D Uᵀ, the loss is `|(e_v U_vv + s) D_v^½|²` with
`s = Σ_{k<v} e_k U_kv`: the squared distance, in the metric `M = U_vv D_v U_vvᵀ`, of its values from
`w_v + s U_vv⁻¹`. So what to look for is the nearest vector of the code book in that metric; then later columns
make up for its error as for any other's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.quantize.solvers.columns import Chosen, Columns

REACH = 1  # scales on either side of a sub-block's fitted one that are tried


class Vectors(Columns):
    """As Columns, of a grid with vectors."""

    def choose(self, group: slice, params: Any, refit: bool) -> None:
        """Codes, errors and loss of a group's columns, and its parameters: every sub-block gets the scale with
        which its vectors, once they know of the errors before them, lose least."""
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
            self.chosen.E[part] = E
            self.chosen.lost += lost.gather(0, best[None])[0]
            self.grid.codes(levels, self.chosen.codes[part])
        self.chosen.params.append(params)

    def _swept(self, part: slice, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Levels and errors `[candidates, columns, out]` and loss `[candidates, out]` with each of `steps`."""
        count, rows = steps.shape
        W, fed = self.Wt[part], self.chosen.E[part]
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
    """As refine.refine, vector by vector: each is chosen again given all others, then scales of sub-blocks and
    of the group; no visit raises the loss of any row. hessian: `[in, in]`, damped."""
    for _ in range(cycles):
        for k in range(len(chosen.params)):
            _visit(Wt, chosen, grid, hessian, k)


def _visit(Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, k: int) -> None:
    size, group = grid.vector_size, slice(k * grid.group_size, (k + 1) * grid.group_size)
    H, E = hessian[group, group], chosen.E[group]
    before, residual = E.clone(), hessian[group] @ chosen.E
    params = chosen.params[k]
    levels = grid.levels(chosen.codes[group])
    for b, low in enumerate(range(0, grid.group_size, grid.sub_size)):
        step = grid.steps(params)[0][b]
        for start in range(low, low + grid.sub_size, size):
            v = slice(start, start + size)
            own = H[v, v]
            pull = torch.linalg.solve(own, residual[v]).div_(step)
            old = levels[v].clone()
            found = grid.search_in(own).nearest(old + pull, old)
            moved = (found - old).mul_(step)
            levels[v] = found
            E[v] -= moved
            residual -= H[:, v] @ moved
        part = slice(low, low + grid.sub_size)
        # the scale that suits these levels best, of those that can be stored
        held = levels[part]
        weighed = H[part, part] @ held
        power = (weighed * held).sum(0)
        better = step + (residual[part] * held).sum(0) / power
        candidate = grid.with_step(params, b, better)
        change = grid.steps(candidate)[0][b] - step
        gain = change * change * power - 2 * change * (residual[part] * held).sum(0)
        change = torch.where(gain < 0, change, 0)
        params = select(gain < 0, candidate, params)
        E[part] -= change * held
        residual -= H[:, part] @ (change * held)
    values = levels * grid.steps(params)[0].repeat_interleave(grid.sub_size, 0)
    power = (values * (H @ values)).sum(0)
    factor = 1 + (values * residual).sum(0) / power
    scaled = grid.scaled(params, torch.where((power > 0) & (factor > 0), factor, 1.0))
    moved = levels * grid.steps(scaled)[0].repeat_interleave(grid.sub_size, 0) - values
    gain = (moved * (H @ moved)).sum(0) - 2 * (moved * residual).sum(0)
    chosen.params[k] = select(gain < 0, scaled, params)
    E -= torch.where(gain < 0, moved, 0)
    residual -= H @ torch.where(gain < 0, moved, 0)
    grid.codes(levels, chosen.codes[group])
