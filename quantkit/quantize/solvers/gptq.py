"""GPTQ: accurate post-training quantization by error feedback (Frantar et al. 2022, arXiv:2210.17323).

For a linear with inputs `X [tokens, in]`, replacing `W` by `Ŵ` costs the loss `tr(E H Eᵀ)` with the error
`E = W - Ŵ` and the Hessian `H = 2 XᵀX` (section 3.1). Columns are quantized one after another. Before its
turn, each column is moved to compensate for the errors of the columns before it.

The paper moves all later columns by a row of the Cholesky factor of `H⁻¹` (section 3.3, step 3). With
`H = A Aᵀ`, A upper triangular, that factor is `A⁻¹`, and at its turn column j has been moved by
`Σ_{k<j} E_k U_kj` with `U = A / diag A`: the same numbers without inverting anything (theorem 6 of QuIP, Chee
et al. 2023, arXiv:2307.13304, where H is U D Uᵀ).

`columns.py` chooses the columns of a group in the paper's lazy batches (step 2). `vectors.py` chooses columns
of code books, several at a time. `refine.py` improves the result of the sweep. If round to nearest has a
lower loss, a linear is rounded to nearest. `tests/reference_gptq.py` follows the paper literally.

With `--target original` a linear also compensates for the errors of earlier linears (`moved`). Its inputs are
X instead of the original model's X̃, and it may add its output to hidden states that differ by R from the
original model's. `|X Ŵᵀ - (X̃ Wᵀ + R)|²` is, up to a constant, `|X (W* - Ŵ)ᵀ|²` with the least-squares
solution

    W* = W + (W (X̃ - X)ᵀX + RᵀX) (XᵀX)⁻¹

so error feedback, refinement and round to nearest start from W*. (GPTAQ, Li et al. 2025, arXiv:2504.02692,
approximates this move column by column, without R.) XᵀX is damped as for error feedback.

A regression fits noise, the more the wider the linear and the shorter the text. The move is computed on two
halves of the text and shrunk to the share on which they agree (Wiener's linear shrinkage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.grid import Grid, QuantizedWeight, group, join, stack
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers import SiteStatistics, Solved, clipping, measured, row_losses, rtn, vectors
from quantkit.quantize.solvers.columns import Chosen, Columns
from quantkit.quantize.solvers.refine import refine

DAMP_RETRIES = 5
Target = Literal["own", "original"]


@dataclass(frozen=True)
class GptqSolver:
    """damp: share of the mean Hessian diagonal that is added to the diagonal. act_order: `none`, `group` or
    `full`. refine: cycles of coordinate descent after the sweep; 0 is the paper's algorithm. target: the
    output to reproduce: the linear's `own` for its present inputs, or the `original` model's (`moved`).

    Columns with large inputs are better quantized first. `full` sorts all columns, so groups are scattered
    over the matrix and the client needs `g_idx`. `group` sorts the groups and the columns inside each group,
    so the file's format stays the same.
    """

    damp: float = 0.01
    act_order: str = "group"
    refine: int = 2
    target: Target = "original"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hessian", "drift"} if self.target == "original" else {"hessian"})

    def solve(
        self,
        weights: Sequence[Tensor],
        grids: Sequence[Grid],
        statistics: SiteStatistics | None,
    ) -> list[Solved]:
        """Solve weights `[out_k, in]` float32. statistics.hessian: `[in, in]` float32, symmetric. With a
        drift, errors are relative to the weights W* that compensate for it.

        Raises QuantkitError if `full` would scatter the columns of a grid with fixed groups.
        """
        assert statistics is not None and statistics.hessian is not None, "gptq works from the Hessian"
        weights = aimed(weights, statistics, self.damp)
        return solve_site(self.quantize, weights, grids, statistics.hessian)

    def pivots(self, hessian: Tensor, grid: Grid) -> Tensor:
        """Return `D [in]` of `H = U diag(D) Uᵀ` in the order of quantization: the cost of a squared error in
        each column after later columns compensate. If H has no factorization, the diagonal of H."""
        order = column_order(hessian.diagonal(), grid, self.act_order)
        A, _ = factorize(hessian.index_select(0, order).index_select(1, order), self.damp)
        found = hessian.diagonal().clone()
        return found if A is None else found.index_copy_(0, order, A.diagonal().square())

    def quantize(self, weights: Sequence[Tensor], grid: Grid, H: Tensor) -> Attempt:
        """Quantize `weights [out_k, in]` on `grid`, stacked as one matrix."""
        order = column_order(H.diagonal(), grid, self.act_order)
        H = H.index_select(0, order).index_select(1, order)
        damping = -H.diagonal().mean()
        A, note = factorize(H, self.damp)
        if A is None:
            return Attempt(None, None, note)
        damping += H.diagonal().mean()
        Wt = (torch.cat(weights) if weights[1:] else weights[0]).t().contiguous().index_select(0, order)
        fixed = None
        if grid.spans_matrix:
            params = stack([grid.fit_matrix(weight) for weight in weights])
            fixed = [group(params, k) for k in places(order, grid).tolist()]
        chosen = sweep(Wt, *unit_upper(A), grid, fixed)
        if self.refine:
            del A
            (refine if grid.vector_size == 1 else vectors.refine)(Wt, chosen, grid, H, self.refine)
        weight = assembled(chosen.codes, chosen.params, order, grid, self.act_order)
        lost = torch.stack([chosen.lost, damping * chosen.E.square_().sum(0)])
        return Attempt(weight, lost, note)


def aimed(weights: Sequence[Tensor], statistics: SiteStatistics, damp: float) -> Sequence[Tensor]:
    """Return the weights to be rounded: `weights`, or with a drift the W* that compensate for it."""
    if statistics.drift is None and statistics.missing is None:
        return weights
    hessian = statistics.hessian if statistics.paired is None else statistics.paired
    factor, _ = factorize(hessian.clone(), damp)
    return weights if factor is None else moved(weights, statistics, factor)


def unit_upper(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return U, unit upper triangular, and D with `A Aᵀ = U diag(D) Uᵀ`; changes A in place."""
    D = A.diagonal().square()
    return A.div_(A.diagonal().clone()), D


def sweep(Wt: Tensor, U: Tensor, D: Tensor, grid: Grid, fixed: list | None = None) -> Chosen:
    """Quantize the columns of W, rows of `Wt [in, out]`, in order with error feedback through U and D.

    fixed: the parameters of each group; None: fitted when the sweep reaches the group, with the pivots D as
    importance. D is the cost of a rounding error in column j after later columns compensate. (With the
    diagonal of H the KL divergence of the bundled model is 5 percent higher, 2 after refinement.)
    """
    columns = (Columns if grid.vector_size == 1 else vectors.Vectors)(Wt, U, D, grid)
    for start in range(0, len(Wt), grid.group_size):
        span = slice(start, start + grid.group_size)
        columns.update(span)
        params = fixed[start // grid.group_size] if fixed else grid.fit(columns.free(span).t(), D[span])
        columns.choose(span, params, refit=not fixed)
    return columns.chosen


def places(order: Tensor, grid: Grid) -> Tensor:
    """Return the original number of each group, for groups that were moved as a whole."""
    return order[:: grid.group_size] // grid.group_size


def assembled(codes: Tensor, params: list, order: Tensor, grid: Grid, act_order: str) -> QuantizedWeight:
    """Return the weight with these codes `[in, out]` and group parameters, columns in their old order."""
    column_group = None
    if act_order == "full":
        column_group = torch.empty_like(order)
        column_group[order] = torch.arange(len(order), device=order.device) // grid.group_size
    else:
        params = [params[k] for k in torch.argsort(places(order, grid)).tolist()]
    codes = torch.empty_like(codes).index_copy_(0, order, codes).t().contiguous()
    return QuantizedWeight(grid, codes, join(params), column_group)


def column_order(diagonal: Tensor, grid: Grid, act_order: str) -> Tensor:
    """Return the order `[in]` in which columns are quantized, from the Hessian's diagonal."""
    columns = torch.arange(len(diagonal), device=diagonal.device)
    if act_order == "none":
        return columns
    if act_order == "full":
        if grid.spans_matrix or grid.sub_size < grid.group_size:
            raise QuantkitError(
                f"columns on a grid of {grid.describe()} have fixed places",
                "use --act-order group",
                UNSUPPORTED,
            )
        return torch.argsort(diagonal, descending=True, stable=True)
    parts = diagonal.view(-1, grid.sub_size)  # inside a sub-block: columns that share all parameters
    inside = torch.argsort(parts, dim=1, descending=True, stable=True)
    if grid.vector_size > 1:  # the columns of a vector belong together
        inside = torch.arange(parts.shape[1], device=parts.device).expand_as(parts)
    groups = torch.argsort(diagonal.view(-1, grid.group_size).mean(1), descending=True, stable=True)
    return columns.view_as(parts).gather(1, inside).view(-1, grid.group_size)[groups].flatten()


def factorize(hessian: Tensor, damp: float) -> tuple[Tensor | None, str | None]:
    """Damp H in place; return upper triangular A with `A Aᵀ = H`, and a note if damping had to grow.

    Adds `damp * mean(diag H)` to the diagonal, and ten times as much, at most five times, until H is positive
    definite; if that fails, A is None and the note gives the reason. A column that no token reached has only
    damping, so it is rounded to nearest.
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


TINY = torch.finfo(torch.float32).tiny


def moved(weights: Sequence[Tensor], statistics: SiteStatistics, factor: Tensor) -> list[Tensor]:
    """Return W* of each of a site's linears, `[out_k, in]`. factor: upper triangular A; `A Aᵀ` is the damped
    H of the paired tokens."""
    found = []
    for weight in weights:  # [2, out, in]
        halves = weight @ statistics.drift if statistics.missing is None else statistics.missing
        # Δ H Δᵀ of a move Δ is the square of these, [2, in, out]
        halves = torch.linalg.solve_triangular(factor, halves.mT, upper=True)
        move = halves.sum(0)
        real = 4 * (halves[0] * halves[1]).sum() / move.square().sum().clamp(min=TINY)
        move = torch.linalg.solve_triangular(factor.t(), move, upper=False).t()
        found.append(torch.addcmul(weight, move, real.clamp(0, 1)))
    return found


CANCELLED = 0.02  # least share of the undamped loss in the damped loss: below, digits cancel


@dataclass(frozen=True)
class Attempt:
    """The result for linears of a site. weight: None if the Hessian has no factorization; note gives the
    reason. lost: of every row, `e H eᵀ` with the damped H, and the damping's part, `[2, out]`."""

    weight: QuantizedWeight | None
    lost: Tensor | None
    note: str | None


def solve_site(
    quantize: Callable[[list[Tensor], Grid, Tensor], Attempt],
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    hessian: Tensor,
) -> list[Solved]:
    """Solve linears `weights [out_k, in]`: `quantize(weights, grid, hessian)` is called once per grid."""
    results: dict[int, Solved] = {}
    for grid in dict.fromkeys(grids):
        members = [k for k, other in enumerate(grids) if other == grid]
        attempt = quantize([weights[k] for k in members], grid, hessian)
        starts = torch.tensor([0] + [len(weights[k]) for k in members]).cumsum(0).tolist()
        for k, start, end in zip(members, starts, starts[1:], strict=False):
            results[k] = _better(attempt, weights[k], slice(start, end), grid, hessian)
    return [results[k] for k in range(len(weights))]


def _better(attempt: Attempt, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> Solved:
    """Return an attempt's rows of one linear, or round to nearest if that has a lower loss on a sample."""
    some = slice(None) if grid.spans_matrix else measured(len(weight))
    part = weight[some]
    nearest = rtn.missed(part, grid, rtn.fitted(part, grid, hessian))
    sums = [row_losses(part, hessian).sum(), row_losses(nearest, hessian).sum()]
    if attempt.weight is not None:
        sums += attempt.lost[:, rows][:, some].sum(1)
    full, rtn_loss, *lost = torch.stack(sums).tolist()
    scale = max(full, 1e-30)
    rtn_error, reason = rtn_loss / scale, attempt.note
    notes = ()
    if attempt.weight is not None:
        notes = (attempt.note,) if attempt.note else ()
        chosen = _rows(attempt.weight, rows)
        damped, damping = lost
        error = (damped - damping) / scale
        if not damped - damping > CANCELLED * damped:  # too little is left of their digits
            error = row_losses(chosen.values()[some] - part, hessian).sum().item() / scale
        if error <= rtn_error:  # not a number loses, too
            return Solved(chosen, error, rtn_error, notes=notes + clipping(chosen))
        reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
    baseline = rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian))
    return Solved(baseline, rtn_error, rtn_error, fallback=reason, notes=notes + clipping(baseline))


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return QuantizedWeight(weight.grid, weight.codes[rows], rows_of(weight.params, rows), weight.column_group)
