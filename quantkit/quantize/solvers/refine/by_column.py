"""Refine single columns.

Two groups, half the matrix apart, are visited at once, which halves the kernel launches. The same run of
columns moves independently in both groups. The joint change is then computed exactly, row by row; if the
moves cancel each other's gain, only the larger one is made. A row whose loss would rise in a visit stays
unchanged. As in the sweep, columns are counted in steps and need one product with their run's levels and one
rounding. With the kernel of chain.py a run is a whole group and has one launch, so groups are visited one by
one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, select
from quantkit.quantize.solvers.batching import by_matrix
from quantkit.quantize.solvers.columns import LONG_RUN, RUN, Chosen, best_factor, chain_for, values_of
from quantkit.quantize.solvers.replay import Replays


def refine(
    Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int, replays: Replays | None
) -> None:
    """See `refine` in `__init__.py`."""
    curvature = hessian.diagonal(dim1=-2, dim2=-1).clone()
    hessian.div_(curvature[..., None])  # its products with E then are the best moves, R_j / H_jj
    hessian, curvature = hessian.view(-1, *hessian.shape[-2:]), curvature.view(-1, len(Wt))
    size, count = grid.group_size, len(chosen.params)
    visit = _Visit(grid, chain_for(Wt.device, grid))
    pairs = count if visit.chain else (count + 1) // 2
    # views [matrices, groups, group_size, out]
    views = [by_matrix(x, hessian).unflatten(1, (-1, size)) for x in (chosen.E, chosen.codes, Wt)]
    for _ in range(cycles):
        for k in range(pairs):
            pair = slice(k, count, pairs)  # groups k and k + pairs, if there are so many
            E, codes, W = (view[:, pair] for view in views)
            rows = hessian.unflatten(1, (-1, size))[:, pair]
            residual = rows.flatten(1, 2) @ by_matrix(chosen.E, hessian)
            given = (
                W,
                residual.view(-1, *W.shape[2:]),
                rows.unflatten(3, (-1, size))[:, :, :, pair].contiguous(),
                curvature.unflatten(1, (-1, 1, size))[:, pair].flatten(0, 1),
            )
            changed, params = (E, codes, chosen.lost), chosen.params[pair]
            if replays:
                chosen.params[pair] = replays(visit.improve, ("visit", grid), changed, given, params)
            else:
                chosen.params[pair] = visit.improve(*changed, *given, params)


class _Visit:
    """Improves one or two groups of every matrix; tensors are `[matrices * groups, group_size, out]`."""

    def __init__(self, grid: Grid, chain: Callable[..., None] | None):
        self.grid, self.chain = grid, chain

    def improve(
        self, E: Tensor, codes: Tensor, lost: Tensor,
        Wt: Tensor, residual: Tensor, hessian: Tensor, curvature: Tensor, params: Sequence,
    ) -> list:  # fmt: skip
        """Choose columns, then scales, again; keep them in the rows where they lower the loss.

        E, codes, Wt: `[matrices, groups, group_size, out]`. lost: `[matrices * out]`. hessian: `[matrices,
        groups, size, groups, size]`, residual: rows of both are divided by `curvature [matrices * groups, 1,
        size]`. Changes E, codes, lost and residual in place; returns new parameters.
        """
        self.shape, self.params, size = E.shape[:2], params, E.shape[2]
        self.residual, self.hessian, self.curvature = residual, hessian, curvature
        # the Hessian inside a group
        self.block = hessian.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
        self.levels = self.grid.levels(codes.flatten(0, 1))
        self.step, self.low = self._steps(params)
        before, residual = torch.sub(Wt, E).flatten(0, 1), residual.clone()
        self._descend()
        if self.grid.sub_size < size:
            self._refit()
        values, scaled = self._rescaled()
        moved = values.sub_(before)
        # the change of `tr(E H Eᵀ)`, from the residuals before and after
        change = -self._weigh(moved, residual.add_(self.residual)).unflatten(0, self.shape).sum(1)
        keep = (change <= 0)[:, None, None]  # not a number stays out
        lost += torch.where(keep[:, 0, 0], change, 0.0).flatten()
        E.sub_(moved.unflatten(0, self.shape).mul_(keep))
        new_codes = torch.empty_like(codes)
        self.grid.codes(self.levels.unflatten(0, self.shape), new_codes)
        codes.copy_(torch.where(keep, new_codes, codes))
        return [select(keep.flatten(), new, old) for new, old in zip(scaled, params, strict=True)]

    def _descend(self) -> None:
        """Choose each column's best level again, one after another; changes `levels` and `residual`."""
        size, sub = self.levels.shape[1], self.grid.sub_size
        low, longest = 0, LONG_RUN if self.chain else RUN
        while low < size:
            high = min(low + longest, (low // sub + 1) * sub)
            run, step = slice(low, high), self.step[:, low // sub, None]
            levels, old = self.levels[:, run], self.levels[:, run].clone()
            ideal = self.residual[:, run] / step
            if self.chain:
                self.chain(ideal.add_(levels), levels, self.block[:, run, run].mT.contiguous(), self.grid)
            else:
                ideal.baddbmm_(self.block[:, run, run], levels)
                feed = self.block[:, run, run].clone()
                feed.diagonal(dim1=1, dim2=2).zero_()
                columns = (part.split(1, 1) for part in (ideal, levels, feed))
                for column, level, others in zip(*columns, strict=True):
                    self.grid.snap(column.baddbmm_(others, levels, alpha=-1), level)
            moved = torch.sub(levels, old).mul_(step)
            if self.shape[1] == 2:
                keep = self._agreed(run, moved)[:, None]
                torch.where(keep, levels, old, out=levels)
                moved.mul_(keep)
            self._follow(run, moved)
            low = high

    def _agreed(self, run: slice, moved: Tensor) -> Tensor:
        """Return which groups move their columns `run`, bool `[matrices * 2, out]`: the group that gains more
        alone, and the other group if both together gain even more."""
        curvature = self.curvature[..., run]
        change = (self.block[:, run, run] @ moved).sub_(self.residual[:, run], alpha=2).mul_(moved)
        change = (curvature @ change).view(*self.shape, -1)
        cross = (self.hessian[:, 0, run, 1, run] @ moved[1::2]).mul_(moved[::2])
        cross = curvature[::2] @ cross
        return ((torch.add(change, cross, alpha=2) <= 0) | (change < change.flip(1))).flatten(0, 1)

    def _follow(self, run: slice, moved: Tensor) -> None:
        """Update the residual after columns `run` of each group changed by `moved`."""
        hessian = self.hessian[..., run].flatten(3).flatten(1, 2)
        residual = self.residual.view(len(hessian), -1, moved.shape[2])
        residual.baddbmm_(hessian, moved.reshape(len(hessian), -1, moved.shape[2]), alpha=-1)

    def _refit(self) -> None:
        """Choose scale and min of each sub-block again, one sub-block after another; levels stay."""
        size = self.grid.sub_size
        for k in range(self.step.shape[1]):
            run = slice(k * size, (k + 1) * size)
            before = self._values_of(k, self.params)
            params = self._refitted(k, run, before)
            moved = self._values_of(k, params).sub_(before)
            change = (self.block[:, run, run] @ moved).sub_(self.residual[:, run], alpha=2)
            keep = self._weigh(moved, change, run) < 0
            if self.shape[1] == 2:
                keep &= self._agreed(run, moved.mul_(keep[:, None]))
            self._follow(run, moved.mul_(keep[:, None]))
            chosen = zip(self._by_group(keep), params, self.params, strict=True)
            self.params = [select(*of_group) for of_group in chosen]
            self.step, self.low = self._steps(self.params)

    def _refitted(self, k: int, run: slice, before: Tensor) -> list:
        """Return parameters with the best scale and min of sub-block k, whose values are `before`."""
        block, residual, values = self.block[:, run, run], self.residual[:, run], before
        if self.grid.has_min:  # fitted last: remove the part of the values that a min can make
            shared = self.curvature[..., run] * block.sum(2)[:, None]
            power_of_shift = shared.sum(2)
            values = values + self.low[:, k, None]
            values -= ((shared @ values)[:, 0] / power_of_shift)[:, None]
        factor = best_factor(
            self._weigh(values, residual.clone(), run), self._weigh(values, block @ values, run)
        )
        pairs = zip(self.params, self._by_group(factor), strict=True)
        params = [self.grid.rescaled(present, k, by) for present, by in pairs]
        if not self.grid.has_min:
            return params
        moved = self._values_of(k, params).sub_(before)
        left = residual - block @ moved
        shift = (self.curvature[..., run] @ left)[:, 0] / power_of_shift
        pairs = zip(params, self._by_group(shift), strict=True)
        return [self.grid.shifted(present, k, by) for present, by in pairs]

    def _rescaled(self) -> tuple[Tensor, list]:
        """Return the groups' values and parameters, multiplied by the best common factor."""
        values = values_of(self.levels, self.step, self.low)
        power = self._weigh(values, self.block @ values)
        factor = best_factor(self._weigh(values, self.residual.clone()), power)
        params = [self.grid.scaled(*p) for p in zip(self.params, self._by_group(factor), strict=True)]
        scaled = values_of(self.levels, *self._steps(params))
        self._follow(slice(None), values.neg_().add_(scaled))
        return scaled, params

    def _values_of(self, k: int, params: Sequence) -> Tensor:
        """Return the values of sub-block k."""
        size, at = self.grid.sub_size, slice(k, k + 1)
        step, low = self._steps(params)
        return values_of(self.levels[:, k * size : (k + 1) * size], step[:, at], low[:, at])

    def _steps(self, params: Sequence) -> tuple[Tensor, Tensor]:
        """Return step and low, `[matrices * groups, sub-blocks, out]`."""
        stacked = map(torch.stack, zip(*map(self.grid.steps, params), strict=True))
        step, low = (x.unflatten(2, (self.shape[0], -1)).movedim(2, 0).flatten(0, 1) for x in stacked)
        return step, low

    def _weigh(self, first: Tensor, second: Tensor, columns: slice = slice(None)) -> Tensor:
        """Return `Σ_j H_jj · first_j · second_j` of each group, `[groups, out]`; changes `second`."""
        return (self.curvature[..., columns] @ second.mul_(first))[:, 0]

    def _by_group(self, x: Tensor) -> Sequence[Tensor]:
        """Return `x [matrices * groups, out]` as rows of parameters, for each group."""
        return [part.flatten() for part in x.unflatten(0, self.shape).unbind(1)]
