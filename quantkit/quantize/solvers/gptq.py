"""GPTQ: accurate post-training quantization by error feedback (Frantar et al. 2022, arXiv:2210.17323).

For a linear with inputs `X [tokens, in]` the loss of replacing `W` by `Ŵ` is `tr(E H Eᵀ)` with the error
`E = W - Ŵ` and the Hessian `H = 2 XᵀX` (section 3.1). Columns are quantized one after another, each after
it was moved to make up for the errors of the columns before it.

The paper moves all later columns by a row of the Cholesky factor of `H⁻¹` (section 3.3, step 3). With
`H = A Aᵀ`, A upper triangular, that factor is `A⁻¹`, and when its turn comes column j has been moved by
`Σ_{k<j} E_k U_kj` with `U = A / diag A`: the same numbers without inverting anything (theorem 6 of QuIP,
Chee et al. 2023, arXiv:2307.13304, where H is U D Uᵀ).

Beside this file: `columns.py` chooses the columns of a group, in the paper's lazy batches (step 2), fast;
`vectors.py` those of a code book, several at a time;
`refine.py` improves what the sweep found; `site.py` splits it among the linears of a site, and keeps it where
it beats round to nearest. `tests/reference_gptq.py` is the paper's algorithm to the letter, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.grid import Grid, QuantizedWeight, group, join, stack
from quantkit.quantize.solvers import SiteStatistics, Solved, site, vectors
from quantkit.quantize.solvers.columns import Chosen, Columns
from quantkit.quantize.solvers.refine import refine

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
        """weights: `[out_k, in]` float32. statistics.hessian: `[in, in]` float32, symmetric.

        Raises QuantkitError where `full` would scatter the columns of a grid that has to know their places.
        """
        assert statistics is not None and statistics.hessian is not None, "gptq works from the Hessian"
        return site.solve(self.quantize, weights, grids, statistics.hessian)

    def quantize(self, weights: Sequence[Tensor], grid: Grid, H: Tensor) -> site.Attempt:
        """`weights [out_k, in]`, as one matrix, on `grid`."""
        order = column_order(H.diagonal(), grid, self.act_order)
        H = H.index_select(0, order).index_select(1, order)
        damping = -H.diagonal().mean()
        A, note = factorize(H, self.damp)
        if A is None:
            return site.Attempt(None, None, note)
        damping += H.diagonal().mean()
        Wt = (torch.cat(weights) if weights[1:] else weights[0]).t().contiguous().index_select(0, order)
        groups = order[:: grid.group_size] // grid.group_size  # where whole groups moved: the old places
        fixed = None
        if grid.spans_matrix:
            params = stack([grid.fit_matrix(weight) for weight in weights])
            fixed = [group(params, k) for k in groups.tolist()]
        chosen = sweep(Wt, A, grid, fixed)
        if self.refine:
            del A
            (refine if grid.vector_size == 1 else vectors.refine)(Wt, chosen, grid, H, self.refine)
        params, column_group = chosen.params, None
        if self.act_order == "full":
            column_group = torch.empty_like(order)
            column_group[order] = torch.arange(len(order), device=order.device) // grid.group_size
        else:
            params = [params[k] for k in torch.argsort(groups).tolist()]
        codes = torch.empty_like(chosen.codes).index_copy_(0, order, chosen.codes).t().contiguous()
        lost = torch.stack([chosen.lost, damping * chosen.E.square_().sum(0)])
        return site.Attempt(QuantizedWeight(grid, codes, join(params), column_group), lost, note)


def sweep(Wt: Tensor, A: Tensor, grid: Grid, fixed: list | None = None) -> Chosen:
    """Quantize the columns of W, rows of `Wt [in, out]`, in order with error feedback through A (used up).

    A group has parameters `fixed`, or they are fitted when the sweep gets to it. Its range is searched with
    the pivots `D = diag(A)²` as importance: what a rounding error in column j costs once the columns behind
    it have made up for what they can (the bare diagonal of H counts it as if they could not, and gave 5
    percent more KL divergence on the demo model, 2 after refinement).
    """
    D = A.diagonal().square()
    U = A.div_(A.diagonal().clone())
    columns = (Columns if grid.vector_size == 1 else vectors.Vectors)(Wt, U, D, grid)
    for start in range(0, len(Wt), grid.group_size):
        span = slice(start, start + grid.group_size)
        columns.update(span)
        params = fixed[start // grid.group_size] if fixed else grid.fit(columns.free(span).t(), D[span])
        columns.choose(span, params, refit=not fixed)
    return columns.chosen


def column_order(diagonal: Tensor, grid: Grid, act_order: str) -> Tensor:
    """The order `[in]` in which columns are quantized, from the Hessian's diagonal."""
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
