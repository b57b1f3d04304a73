"""GPTQ: accurate post-training quantization by error feedback (Frantar et al. 2022, arXiv:2210.17323).

For a site with inputs `X [tokens, in]` the loss of replacing `W` by `Ŵ` is `tr(dW H dWᵀ)` with the
Hessian `H = 2 XᵀX` (section 3.1). Columns are quantized one after another, each after it was moved
to make up for the errors of the columns before it.

The paper moves all later columns by a row of the Cholesky factor of `H⁻¹` (section 3.3, step 3).
With `H = A Aᵀ`, A upper triangular, that factor is `A⁻¹`, and its move of column j adds up to
`Σ_{k<j} (w_k - ŵ_k) A_kj / A_jj`: the same numbers without inverting anything (the equivalence is
theorem 6 of QuIP, Chee et al. 2023, arXiv:2307.13304). Sums over finished blocks are matrix
products, as in the paper's lazy batch updates (step 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight, group, join, stack
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers import SiteStatistics, Solved, clipping, rtn
from quantkit.quantize.solvers.loss import loss, row_losses
from quantkit.quantize.solvers.refine import refine
from quantkit.quantize.solvers.sweep import sweep

CANCELLED = 0.02  # share of a damped loss that has to be left without the damping for it to be told from both
DAMP_RETRIES = 5


@dataclass(frozen=True)
class GptqSolver:
    """damp: share of the mean Hessian diagonal added to it. act_order: `none`, `group` or `full`.
    refine: cycles of coordinate descent after the sweep; 0 is the paper's algorithm and no more.

    Columns with large inputs are better quantized first. `full` sorts all columns, so that groups
    are scattered over the matrix and the client needs `g_idx`; `group` sorts the groups and the
    columns inside each of them, which leaves no trace on disk.
    """

    damp: float = 0.01
    act_order: str = "group"
    refine: int = 2
    needs = frozenset({"hessian"})

    def solve(
        self, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
    ) -> list[Solved]:
        """All linears of a site that share a grid go through one sweep over the columns.

        weights: `[out_k, in]` float32. statistics.hessian: `[in, in]` float32, symmetric.
        """
        assert statistics is not None and statistics.hessian is not None, "gptq works from the Hessian"
        hessian = statistics.hessian
        results: dict[int, Solved] = {}
        for grid in dict.fromkeys(grids):
            members = [k for k, other in enumerate(grids) if other == grid]
            solved = self._solve([weights[k] for k in members], grid, hessian)
            starts = torch.tensor([0] + [len(weights[k]) for k in members]).cumsum(0).tolist()
            for k, start, end in zip(members, starts, starts[1:], strict=False):
                results[k] = _better(solved, weights[k], slice(start, end), grid, hessian)
        return [results[k] for k in range(len(weights))]

    def _solve(self, weights: list[Tensor], grid: Grid, hessian: Tensor) -> _Sweep:
        order = column_order(hessian.diagonal(), grid.group_size, self.act_order)
        damped = hessian.index_select(0, order).index_select(1, order)
        added = -damped.diagonal().mean()
        factor, note = factorize(damped, self.damp)
        if factor is None:
            return _Sweep(None, None, note)
        added += damped.diagonal().mean()
        target = (torch.cat(weights) if weights[1:] else weights[0]).t().contiguous().index_select(0, order)
        groups = order[:: grid.group_size] // grid.group_size  # where whole groups moved: the old places
        chosen = sweep(target, grid, factor, _fixed(weights, grid, groups))
        if self.refine:
            del factor
            refine(target, chosen, grid, damped, self.refine)
        params, column_group = chosen.params, None
        if self.act_order == "full":
            column_group = torch.empty_like(order)
            column_group[order] = torch.arange(len(order), device=order.device) // grid.group_size
        else:
            params = [params[k] for k in torch.argsort(groups).tolist()]
        codes = torch.empty_like(chosen.codes).index_copy_(0, order, chosen.codes).t().contiguous()
        lost = chosen.lost, added * chosen.delta.square_().sum(0)
        return _Sweep(QuantizedWeight(grid, codes, join(params), column_group), torch.stack(lost), note)


def _fixed(weights: list[Tensor], grid: Grid, groups: Tensor) -> list | None:
    """Parameters of each group, in the sweep's order, for a grid whose groups depend on one another."""
    if not grid.spans_matrix:
        return None
    params = stack([grid.fit_matrix(weight) for weight in weights])
    return [group(params, k) for k in groups.tolist()]


@dataclass(frozen=True)
class _Sweep:
    """weight: None where the Hessian could not be factored. lost: of every row, `dw H dwᵀ` with the damped H,
    and the part of it that is the damping's, `[2, out]`."""

    weight: QuantizedWeight | None
    lost: Tensor | None
    note: str | None


def column_order(diagonal: Tensor, group_size: int, act_order: str) -> Tensor:
    """The order `[in]` in which columns are quantized, from the Hessian's diagonal."""
    columns = torch.arange(len(diagonal), device=diagonal.device)
    if act_order == "none":
        return columns
    if act_order == "full":
        return torch.argsort(diagonal, descending=True, stable=True)
    grouped = diagonal.view(-1, group_size)
    inside = torch.argsort(grouped, dim=1, descending=True, stable=True)
    groups = torch.argsort(grouped.mean(1), descending=True, stable=True)
    return columns.view(-1, group_size).gather(1, inside)[groups].flatten()


def factorize(hessian: Tensor, damp: float) -> tuple[Tensor | None, str | None]:
    """Damp H in place; upper triangular A with `A Aᵀ` equal to it, and a note if damping had to grow.

    Adds `damp * mean(diag H)` to the diagonal; tenfold, at most five times, while that is not
    positive definite. Then A is None and the note says why. A column no token reached has nothing
    but damping: it is rounded to nearest.
    """
    diagonal = hessian.diagonal().clone()
    mean = diagonal.mean()
    if mean == 0:  # no token reached any column: every choice is as good, nearest is natural
        mean += 1
    for attempt in range(DAMP_RETRIES + 1):
        share = damp * 10**attempt
        hessian.diagonal().copy_(diagonal + share * mean)
        lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        if info == 0 and torch.isfinite(lower.diagonal()).all():
            return lower.flip(0, 1), f"damping raised to {share:g}" if attempt else None
    return None, f"Hessian is not positive definite even with damping {share:g}"


def _better(solved: _Sweep, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> Solved:
    """The sweep's rows of one linear, or round to nearest where that loses less on the same inputs."""
    params = grid.fit_matrix(weight, hessian.diagonal() if grid.weighted else None)
    sums = [row_losses(weight, hessian).sum(), row_losses(rtn.missed(weight, grid, params), hessian).sum()]
    if solved.weight is not None:
        sums += solved.lost[:, rows].sum(1)
    full, rtn_loss, *lost = torch.stack(sums).tolist()
    scale = max(full, 1e-30)
    rtn_error = rtn_loss / scale
    if solved.weight is None:
        baseline = rtn.nearest(weight, grid, params)
        return Solved(baseline, rtn_error, rtn_error, fallback=solved.note, notes=clipping(baseline))
    chosen = _rows(solved.weight, rows)
    notes = ((solved.note,) if solved.note else ()) + clipping(chosen)
    damped, damping = lost
    error = (damped - damping) / scale
    if not damped - damping > CANCELLED * damped:  # too little is left of their digits
        error = loss(chosen.values() - weight, hessian) / scale
    if not error <= rtn_error:  # not a number loses, too
        reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
        baseline = rtn.nearest(weight, grid, params)
        notes = ((solved.note,) if solved.note else ()) + clipping(baseline)
        return Solved(baseline, rtn_error, rtn_error, fallback=reason, notes=notes)
    return Solved(chosen, error, rtn_error, notes=notes)


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return QuantizedWeight(weight.grid, weight.codes[rows], rows_of(weight.params, rows), weight.column_group)
