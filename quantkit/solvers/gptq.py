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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.grids import Grid, QuantizedWeight, group, join, stack
from quantkit.grids import rows as rows_of
from quantkit.solvers import SiteStatistics, Solved, clipping, rtn
from quantkit.solvers.loss import loss
from quantkit.solvers.refine import refine

BLOCK = 128  # columns between two lazy updates; the paper's B
RUN = 32  # columns inside which a column is brought up to date by a matrix-vector product
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
        damped = hessian[order][:, order]
        factor, note = factorize(damped, self.damp)
        if factor is None:
            return _Sweep(None, note)
        target = (torch.cat(weights) if weights[1:] else weights[0])[:, order]
        groups = order[:: grid.group_size] // grid.group_size  # where whole groups moved: the old places
        codes, params = sweep(target, grid, factor, _fixed(weights, grid, groups))
        if self.refine:
            codes, params = refine(target, codes, params, grid, damped, self.refine)
        column_group = None
        if self.act_order == "full":
            column_group = torch.empty_like(order)
            column_group[order] = torch.arange(len(order), device=order.device) // grid.group_size
        else:
            params = [params[k] for k in torch.argsort(groups).tolist()]
        unsorted = torch.empty_like(codes)
        unsorted[:, order] = codes
        return _Sweep(QuantizedWeight(grid, unsorted, join(params), column_group), note)


def _fixed(weights: list[Tensor], grid: Grid, groups: Tensor) -> list | None:
    """Parameters of each group, in the sweep's order, for a grid whose groups depend on one another."""
    if not grid.spans_matrix:
        return None
    params = stack([grid.fit_matrix(weight) for weight in weights])
    return [group(params, k) for k in groups.tolist()]


@dataclass(frozen=True)
class _Sweep:
    weight: QuantizedWeight | None  # None: the Hessian could not be factored
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


def sweep(weight: Tensor, grid: Grid, factor: Tensor, fixed: list | None = None) -> tuple[Tensor, list]:
    """Quantize the columns of `weight [out, in]` in order with error feedback through `factor` (A).

    Returns codes uint8 `[out, in]` and the parameters of each group: `fixed` where given, else fitted
    when the sweep gets to the group, and to each of its sub-blocks. A group's range is searched with the
    pivots `A_jj²` as importance: what a rounding error in column j costs once the columns
    behind it have made up for what they can (the bare diagonal of H counts it as if they could not,
    and gave 5 percent more KL divergence on the demo model, 2 after refinement). Works on `Wᵀ`,
    where a column is contiguous.
    """
    rows = weight.t().contiguous()  # [in, out]
    errors = torch.empty_like(rows)  # w - ŵ
    carry = torch.zeros_like(rows)  # Σ over finished columns k of errors_k A_kj
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    importance = factor.diagonal().square()
    size = grid.group_size
    params: list = []
    for start, end in blocks(len(rows), size):
        for low, high in runs(start, end, grid.sub_size):
            opens = low % size == 0  # a group as a whole learns of the block's errors before it is fitted
            since, until = (start, min(end, low + size)) if opens else (max(start, low // size * size), high)
            if low > since:
                carry[low:until].addmm_(factor[since:low, low:until].t(), errors[since:low])
            if opens and fixed:
                params.append(fixed[low // size])
            elif opens:
                span = slice(low, low + size)
                target = _freely(rows[span], carry[span], factor[span, span]) if low else rows[span]
                params.append(grid.fit(target.t().contiguous(), importance[span]))
            elif low % grid.sub_size == 0 and not fixed:
                span = slice(low, low + grid.sub_size)
                target = _freely(rows[span], carry[span], factor[span, span])
                params[-1] = grid.refit(target.t().contiguous(), params[-1], low % size, importance[span])
            run = slice(low, high)
            codes[run] = _columns(
                rows[run], carry[run], errors[run], factor[run, run], grid, params[-1], low % size
            )
        carry[end:].addmm_(factor[start:end, end:].t(), errors[start:end])
    return codes.t().contiguous(), params


def _columns(
    rows: Tensor, carry: Tensor, errors: Tensor, factor: Tensor, grid: Grid, params: Any, first: int
) -> Tensor:
    """Codes of one run of a group's columns, one after another; fills in their `errors`.

    All `[run, out]`, factor the run's own; `first` is the place of the run in its group.
    """
    chosen = []
    before = errors.t()
    columns = zip(rows.unbind(), carry.unbind(), errors.unbind(), factor.diagonal().unbind(), strict=True)
    for k, (row, carried, error, pivot) in enumerate(columns):
        if k:
            carried.addmv_(before[:, :k], factor[:k, k])
        codes, values = grid.round_column(torch.addcdiv(row, carried, pivot), params, first + k)
        chosen.append(codes)
        torch.sub(row, values, out=error)
    return torch.stack(chosen)


def _freely(rows: Tensor, carry: Tensor, factor: Tensor) -> Tensor:
    """Where a group's columns would go, given the errors before it, if they could take any value."""
    identity = torch.eye(len(factor), device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=True)
    return torch.addmm(rows, inverse.t(), carry)


def blocks(in_features: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Column ranges between lazy updates: about BLOCK wide, never crossing into a new group midway."""
    width = group_size if group_size > BLOCK else BLOCK // group_size * group_size
    for start in range(0, in_features, width):
        end = min(start + width, in_features)
        for low in range(start, end, BLOCK):
            yield low, min(low + BLOCK, end)


def runs(start: int, end: int, sub_size: int) -> Iterator[tuple[int, int]]:
    """The parts of a block that share one step each, at most RUN wide."""
    low = start
    while low < end:
        high = min(end, (low // sub_size + 1) * sub_size, low + RUN)
        yield low, high
        low = high


def _better(solved: _Sweep, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> Solved:
    """The sweep's rows of one linear, or round to nearest where that loses less on the same inputs."""
    baseline = rtn.quantize(weight, grid, hessian.diagonal() if grid.weighted else None)
    scale = max(loss(weight, hessian), 1e-30)
    rtn_error = loss(baseline.values() - weight, hessian) / scale
    if solved.weight is None:
        return Solved(baseline, rtn_error, rtn_error, fallback=solved.note, notes=clipping(baseline))
    chosen = _rows(solved.weight, rows)
    notes = ((solved.note,) if solved.note else ()) + clipping(chosen)
    error = loss(chosen.values() - weight, hessian) / scale
    if not error <= rtn_error:  # not a number loses, too
        reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
        return Solved(baseline, rtn_error, rtn_error, fallback=reason, notes=notes)
    return Solved(chosen, error, rtn_error, notes=notes)


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return QuantizedWeight(weight.grid, weight.codes[rows], rows_of(weight.params, rows), weight.column_group)
