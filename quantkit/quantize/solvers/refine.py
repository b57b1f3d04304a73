"""Refinement: coordinate descent on codes and scales, starting from GPTQ's result.

GPTQ fixes each column before it knows the later columns. Once all columns are chosen, any of them can be
chosen again: with `r = H (W - Ŵ)ᵀ` the loss `tr(dW H dWᵀ)` along column j is least at `ŵ_j + r_j / H_jj`, so
moving to the nearest grid value never raises the loss (cyclic coordinate descent, as in QuantEase, Behdin et
al. 2023, arXiv:2309.01885, section 3). Likewise, a group's values `V` have a best common factor,
`1 + <r, V> / <V, H V>`, which is multiplied into the scale.

Two groups, half the matrix apart, are visited at once, which halves the kernel launches. The same run of
columns moves independently in both groups. The joint change is then computed exactly, row by row; if the
moves cancel each other's gain, only the larger one is made. A row whose loss would rise in a visit stays
unchanged. As in the sweep, columns are counted in steps and need one product with their run's levels and one
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.quantize.solvers.columns import RUN, Chosen, parts

TINY = torch.finfo(torch.float32).tiny


def refine(Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int) -> None:
    """Improve codes and parameters for `Wt [in, out]` in place, with the same grid and number of bytes.

    hessian: `[in, in]`, or `[matrices, in, in]` for `Wt [in, matrices * out]`; damped, in the same column
    order; changed in place. cycles: visits of each group. (If
    scales are only chosen in the last visit, the loss is 0.2 percent higher, but the KL divergence of the
    bundled model in 2 bits is 3 percent higher.)
    """
    curvature = hessian.diagonal(dim1=-2, dim2=-1).clone()
    hessian.div_(curvature[..., None])  # row j is what column j goes by
    hessian, curvature = hessian.view(-1, *hessian.shape[-2:]), curvature.view(-1, len(Wt))
    pairs = (len(chosen.params) + 1) // 2
    for _ in range(cycles):
        for k in range(pairs):
            groups = range(k, len(chosen.params), pairs)
            _Visit(Wt, chosen, grid, hessian, curvature, groups).improve()


class _Visit:
    """One or two groups of every matrix; all tensors are `[matrices * groups, group_size, out]`."""

    def __init__(
        self, Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, curvature: Tensor, groups: range
    ):
        self.grid, self.chosen, self.groups = grid, chosen, groups
        self.places = len(hessian), len(groups)
        size, where = grid.group_size, slice(groups.start, None, groups.step)
        # views [matrices, groups, group_size, out]
        own = (parts(x, hessian).unflatten(1, (-1, size))[:, where] for x in (Wt, chosen.E, chosen.codes))
        self.Wt, self.E, self.codes = own
        rows = hessian.unflatten(1, (-1, size))[:, where]
        residual = rows.flatten(1, 2) @ parts(chosen.E, hessian)  # r_j / H_jj
        self.residual = residual.view(-1, *self.Wt.shape[2:])
        # [matrices, groups, size, groups, size], and what columns of the same group are to each other
        self.hessian = rows.unflatten(3, (-1, size))[:, :, :, where].contiguous()
        self.own = self.hessian.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
        self.curvature = curvature.unflatten(1, (-1, 1, size))[:, where].flatten(0, 1)
        self.levels = grid.levels(self.codes.flatten(0, 1))
        self.step, self.low = self._steps([chosen.params[k] for k in groups])

    def improve(self) -> None:
        """Choose columns, then scales, again; keep them in the rows where they lower the loss."""
        before, residual = torch.sub(self.Wt, self.E).flatten(0, 1), self.residual.clone()
        self._descend()
        values, params = self._rescaled()
        moved = values.sub_(before)
        change = -self._weigh(moved, residual.add_(self.residual)).unflatten(0, self.places).sum(1)
        keep, chosen = (change <= 0)[:, None, None], self.chosen  # not a number stays out
        chosen.lost += torch.where(keep[:, 0, 0], change, 0.0).flatten()
        self.E.sub_(moved.unflatten(0, self.places).mul_(keep))
        codes = torch.empty_like(self.codes)
        self.grid.codes(self.levels.unflatten(0, self.places), codes)
        self.codes.copy_(torch.where(keep, codes, self.codes))
        for k, found in zip(self.groups, params, strict=True):
            chosen.params[k] = select(keep.flatten(), found, chosen.params[k])

    def _descend(self) -> None:
        """Choose each column's best level again, one after another; changes `levels` and `residual`."""
        feed = self.own.clone()
        feed.diagonal(dim1=1, dim2=2).zero_()
        size, sub = self.levels.shape[1], self.grid.sub_size
        low = 0
        while low < size:
            high = min(low + RUN, (low // sub + 1) * sub)
            run, step = slice(low, high), self.step[:, low // sub, None]
            levels, old = self.levels[:, run], self.levels[:, run].clone()
            ideal = torch.baddbmm(self.residual[:, run] / step, self.own[:, run, run], levels)
            columns = (part.split(1, 1) for part in (ideal, levels, feed[:, run, run]))
            for column, level, others in zip(*columns, strict=True):
                self.grid.snap(column.baddbmm_(others, levels, alpha=-1), level)
            moved = torch.sub(levels, old).mul_(step)
            if len(self.groups) == 2:
                keep = self._agreed(run, moved)[:, None]
                torch.where(keep, levels, old, out=levels)
                moved.mul_(keep)
            self._follow(run, moved)
            low = high

    def _agreed(self, run: slice, moved: Tensor) -> Tensor:
        """Return which groups move their columns `run`, bool `[matrices * 2, out]`: the group that gains more
        alone, and the other group if both together gain even more."""
        curvature = self.curvature[..., run]
        change = (self.own[:, run, run] @ moved).sub_(self.residual[:, run], alpha=2).mul_(moved)
        change = (curvature @ change).view(*self.places, -1)
        cross = (self.hessian[:, 0, run, 1, run] @ moved[1::2]).mul_(moved[::2])
        cross = curvature[::2] @ cross
        return ((torch.add(change, cross, alpha=2) <= 0) | (change < change.flip(1))).flatten(0, 1)

    def _follow(self, run: slice, moved: Tensor) -> None:
        """Update the residual after columns `run` of each group changed by `moved`."""
        hessian = self.hessian[..., run].flatten(3).flatten(1, 2)
        residual = self.residual.view(len(hessian), -1, moved.shape[2])
        residual.baddbmm_(hessian, moved.reshape(len(hessian), -1, moved.shape[2]), alpha=-1)

    def _rescaled(self) -> tuple[Tensor, list]:
        """Return the groups' values and parameters, multiplied by the best common factor."""
        values = self._values(self.step, self.low)
        power = self._weigh(values, self.own @ values)
        factor = 1 + self._weigh(values, self.residual.clone()) / power.clamp(min=TINY)
        factor = torch.where((power > 0) & (factor > 0), factor, 1.0)
        found = zip(self.groups, factor.unflatten(0, self.places).unbind(1), strict=True)
        params = [self.grid.scaled(self.chosen.params[k], part.flatten()) for k, part in found]
        scaled = self._values(*self._steps(params))
        self._follow(slice(None), values.neg_().add_(scaled))
        return scaled, params

    def _steps(self, params: list) -> tuple[Tensor, Tensor]:
        """Return step and low, `[matrices * groups, sub-blocks, out]`."""
        found = map(torch.stack, zip(*map(self.grid.steps, params), strict=True))
        step, low = (x.unflatten(2, (self.places[0], -1)).movedim(2, 0).flatten(0, 1) for x in found)
        return step, low

    def _values(self, step: Tensor, low: Tensor) -> Tensor:
        values = self.levels.unflatten(1, (-1, self.grid.sub_size)) * step[:, :, None]
        return values.sub_(low[:, :, None]).flatten(1, 2)

    def _weigh(self, one: Tensor, other: Tensor) -> Tensor:
        """Return Σ H_jj · one · other over a group's columns, `[groups, out]`; changes `other` in place."""
        return (self.curvature @ other.mul_(one))[:, 0]
