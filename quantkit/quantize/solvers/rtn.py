"""Round to nearest: every weight becomes its group's nearest value. Data-free; the baseline.

AWQ's clipping (Lin et al. 2023, arXiv:2306.00978, section 3.2) narrows each group's range. The published
search multiplies every candidate by the calibration tokens. Its loss, the squared error of a group's part of
the output, is quadratic in the weights' error, so here it is `dw_g H_gg dw_gᵀ`, computed from second moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight, flat, join, select
from quantkit.grids.grid import rows as rows_of
from quantkit.grids.parallel import by_chunks, rows_at_once
from quantkit.layouts import Statistic
from quantkit.quantize.solvers import Solved, Solver, clipping, loss, measured


def quantize(weight: Tensor, grid: Grid) -> QuantizedWeight:
    """Return `weight [out, in]` float32 rounded to nearest on `grid`."""
    return nearest(weight, grid, grid.fit_matrix(weight))


def fitted(weight: Tensor, grid: Grid, hessian: Tensor) -> Any:
    """Return parameters `[out, groups]`; `weighted` grids weigh columns by their inputs' mean square."""
    return grid.fit_matrix(weight, hessian.diagonal(dim1=-2, dim2=-1) if grid.weighted else None)


def nearest(weight: Tensor, grid: Grid, params: Any) -> QuantizedWeight:
    """Return `weight [out, in]` rounded to nearest with the parameters `[out, groups]`."""
    codes = grid.round(weight.reshape(-1, grid.group_size), flat(params))
    return QuantizedWeight(grid, codes.view(weight.shape), params)


def missed(weight: Tensor, grid: Grid, params: Any) -> Tensor:
    """Return `Ŵ - W`, `[out, in]`, where Ŵ is the result of `nearest`."""
    delta = torch.empty_like(weight)

    def work(chunk: slice) -> None:
        values = weight[chunk].reshape(-1, grid.group_size).clone()
        values = grid.nearest(values, flat(rows_of(params, chunk))).view_as(weight[chunk])
        torch.sub(values, weight[chunk], out=delta[chunk])

    by_chunks(work, weight)
    return delta


@dataclass(frozen=True)
class RtnSolver(Solver):
    """Round to nearest. threshold: count LLM.int8's outlier columns by this threshold on calibration text.
    weighted: measure errors of outputs, and clip groups of grids with `clip`."""

    threshold: float | None = None
    weighted: bool = False

    @property
    def needs(self) -> frozenset[Statistic]:
        counting = {Statistic.PEAK} if self.threshold is not None else set()
        return frozenset(counting | ({Statistic.HESSIAN} if self.weighted else set()))

    def solve(
        self, weights: Sequence[Tensor], grids: Sequence[Grid], hessian: Tensor | None = None, *unused: Any
    ) -> list[Solved]:
        """Solve a site. Errors are None unless weighted."""
        pairs = zip(weights, grids, strict=True)
        if self.weighted:
            return [_weighted(weight, grid, hessian) for weight, grid in pairs]
        quantized = [quantize(weight, grid) for weight, grid in pairs]
        return [Solved(weight, None, notes=clipping(weight)) for weight in quantized]

    def outliers(self, peak: Tensor) -> int:
        """Return the number of outlier columns of inputs with this peak, `[in]`."""
        return int((peak >= self.threshold).sum()) if self.threshold else 0


def _weighted(weight: Tensor, grid: Grid, hessian: Tensor) -> Solved:
    """Round a linear; if its grid has `clip` and the outputs' error falls, with clipped ranges."""

    sample = measured(len(weight))
    scale = max(loss(weight[sample], hessian), 1e-30)
    plain = nearest(weight, grid, fitted(weight, grid, hessian))
    plain_error = loss(plain.values()[sample] - weight[sample], hessian) / scale
    if grid.clip:
        clipped = nearest(weight, grid, clipped_ranges(weight, grid.plain(), hessian))
        error = loss(clipped.values()[sample] - weight[sample], hessian) / scale
        if error <= plain_error:
            return Solved(clipped, error, plain_error, notes=clipping(clipped))
    return Solved(plain, plain_error, plain_error, notes=clipping(plain))


TEMPORARIES = 8  # tensors of the size of the groups that are searched together
SHRINKS = tuple(1 - k / 20 for k in range(10))  # 1.00, 0.95 … 0.55 of a group's largest weight


def clipped_ranges(weight: Tensor, grid: Grid, hessian: Tensor) -> Any:
    """Return the parameters `[out, groups]` of least loss, per row and group, for `weight [out, in]`.

    The full range is the first candidate; of equal candidates the first wins.
    """
    rows, size = len(weight), grid.group_size
    at_once = rows_at_once(weight.device, rows * size, TEMPORARIES)
    groups = weight.unflatten(1, (-1, size)).transpose(0, 1).split(at_once)
    blocks = hessian.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2)
    params = []
    for group, moments in zip(groups, blocks.permute(2, 0, 1).split(at_once), strict=True):
        best = _search(group.contiguous(), grid, moments.contiguous())
        params += [rows_of(best, slice(start, start + rows)) for start in range(0, len(group) * rows, rows)]
    return join(params)


def _search(weight: Tensor, grid: Grid, hessian: Tensor) -> Any:
    """Return the parameters `[groups * rows]` of groups `weight [groups, rows, group_size]` with their blocks
    of the Hessian, `[groups, group_size, group_size]`."""
    largest = weight.abs().amax(2, keepdim=True)
    best = best_loss = None
    for shrink in SHRINKS:
        bound = largest * shrink
        params = grid.fit(torch.clamp(weight, -bound, bound).flatten(0, 1))
        delta = grid.nearest(weight.flatten(0, 1).clone(), params).view_as(weight).sub_(weight)
        losses = (delta @ hessian).mul_(delta).sum(2).flatten()
        if best is None:
            best, best_loss = params, losses
            continue
        better = losses < best_loss
        best, best_loss = select(better, params, best), torch.where(better, losses, best_loss)
    return best
