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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.grid import Grid, QuantizedWeight, group, join, regrouped, stack
from quantkit.grids.grid import rows as rows_of
from quantkit.layouts import Statistic
from quantkit.quantize.solvers import Solved, Solver, clipping, measured, row_losses, rtn, vectors
from quantkit.quantize.solvers.columns import Chosen, Columns, add_product
from quantkit.quantize.solvers.refine import refine
from quantkit.quantize.solvers.replay import Replays

DAMP_RETRIES = 5
Target = Literal["own", "original"]


@dataclass(frozen=True)
class GptqSolver(Solver):
    """damp: share of the mean Hessian diagonal that is added to the diagonal. act_order: `none`, `group` or
    `full`. refine: cycles of coordinate descent after the sweep; 0 is the paper's algorithm. target: the
    output to reproduce: the linear's `own` for its present inputs, or the `original` model's: then the caller
    gives weights from `calibrate/statistics.py::retarget`.

    Columns with large inputs are better quantized first. `full` sorts all columns, so groups are scattered
    over the matrix and the client needs `g_idx`. `group` sorts the groups and the columns inside each group,
    so the file's format stays the same.
    """

    damp: float = 0.01
    act_order: str = "group"
    refine: int = 2
    target: Target = "original"

    @cached_property
    def _replays(self) -> Replays:
        return Replays()

    @property
    def needs(self) -> frozenset[Statistic]:
        drift = {Statistic.DRIFT} if self.target == "original" else set()
        return frozenset({Statistic.HESSIAN} | drift)

    def solve(
        self,
        weights: Sequence[Tensor],
        grids: Sequence[Grid],
        hessian: Tensor | None = None,
        curvatures: Sequence[Tensor | None] = (),
    ) -> list[Solved]:
        """Solve weights `[out_k, in]` float32. hessian: `[in, in]` float32, symmetric.

        Raises QuantkitError if `full` would scatter the columns of a grid with fixed groups.
        """
        assert hessian is not None, "gptq works from the Hessian"
        return [solved for (solved,) in self._solve(weights, grids, hessian)]

    def solve_many(self, sites: Sequence[tuple]) -> list[list[Solved]]:
        """See `Solver`. Sites of equal shape, like experts', are one batch. (A CPU adds up products of few
        rows, or an odd number, differently.)"""
        weights, grids, hessians, *_ = zip(*sites, strict=True)
        kinds = {(*own, *(w.shape for w in each)) for own, each in zip(grids, weights, strict=True)}
        able = all(
            grid.many and grid.sub_size == grid.group_size and not grid.spans_matrix for grid in grids[0]
        )
        found = []
        if able and len(kinds) == 1 < len(sites):
            stacked = [torch.stack(each) for each in zip(*weights, strict=True)]
            found = self._solve(stacked, grids[0], torch.stack(hessians))
        return list(map(list, zip(*found, strict=True))) or super().solve_many(sites)

    def _solve(self, weights: Sequence[Tensor], grids: Sequence[Grid], hessian: Tensor) -> list[list[Solved]]:
        """Return the results of linears `weights [(sites,) out_k, in]`, of which those of one grid are solved
        together: for each linear a list, with the result of each site. No list: sites differ in damping."""
        results: dict[int, list[Solved]] = {}
        for grid in dict.fromkeys(grids):
            members = [k for k, other in enumerate(grids) if other == grid]
            attempt = self.quantize([weights[k] for k in members], grid, hessian)
            if not attempt.weights and hessian.ndim > 2:
                return []
            starts = torch.tensor([0] + [weights[k].shape[-2] for k in members]).cumsum(0).tolist()
            for k, start, end in zip(members, starts, starts[1:], strict=False):
                results[k] = _better(attempt, weights[k], slice(start, end), grid, hessian)
        return [results[k] for k in range(len(weights))]

    def pivots(self, hessian: Tensor, grid: Grid) -> Tensor:
        """Return `D [in]` of `H = U diag(D) Uᵀ` in the order of quantization: the cost of a squared error in
        each column after later columns compensate. If H has no factorization, the diagonal of H."""
        order = column_order(hessian.diagonal(), grid, self.act_order)
        A, *_ = factorize(hessian, self.damp, order)
        found = hessian.diagonal().clone()
        return found if A is None else found.index_copy_(0, order, A.diagonal().square())

    def quantize(self, weights: Sequence[Tensor], grid: Grid, H: Tensor) -> Attempt:
        """Quantize `weights [(sites,) out_k, in]` on `grid`, stacked as one matrix; H `[(sites,) in, in]`."""
        H = H.mT  # where a scale divided the inputs, rounding leaves H only nearly symmetric
        order = column_order(H.diagonal(dim1=-2, dim2=-1), grid, self.act_order)
        A, damping, note = factorize(H, self.damp, order)
        if A is None:
            return Attempt([], None, note)
        Wt = picked((torch.cat(weights, -2) if weights[1:] else weights[0]).mT, order)
        Wt = Wt.movedim(-2, 0).flatten(1)
        fixed = []
        if grid.spans_matrix:
            params = stack([grid.fit_matrix(weight) for weight in weights])
            fixed = [group(params, k) for k in places(order, grid).tolist()]
        chosen = sweep(Wt, *unit_upper(A), grid, fixed, self._replays)
        del A  # as large as the copy of H that refinement changes
        if self.refine:
            H = damped(H, order, damping)
            if grid.vector_size == 1:
                refine(Wt, chosen, grid, H, self.refine, self._replays)
            else:
                vectors.refine(Wt, chosen, grid, H, self.refine)
        found = assembled(chosen.codes, chosen.params, order, grid, self.act_order)
        lost = torch.stack([chosen.lost, chosen.E.square_().sum(0)]).view(2, len(found), -1)
        lost[1] *= damping
        return Attempt(found, lost, note, grid.clipped(join(chosen.params)) > 0)


def unit_upper(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return U, unit upper triangular, and D with `A Aᵀ = U diag(D) Uᵀ`; changes A in place."""
    pivots = A.diagonal(dim1=-2, dim2=-1).clone()
    return A.div_(pivots[..., None, :]), pivots.square()


def sweep(
    Wt: Tensor, U: Tensor, D: Tensor, grid: Grid, fixed: Sequence = (), replays: Replays | None = None
) -> Chosen:
    """Quantize the columns of W, rows of `Wt [in, out]`, in order with error feedback through U and D.

    fixed: the parameters of each group; empty: fitted when the sweep reaches the group, with the pivots D as
    importance. D is the cost of a rounding error in column j after later columns compensate. (With the
    diagonal of H the KL divergence of the bundled model is 5 percent higher, 2 after refinement.)
    """
    columns = (Columns if grid.vector_size == 1 else vectors.Vectors)(Wt, U, grid)
    codes = torch.empty(Wt.shape, dtype=torch.uint8, device=Wt.device)
    chosen = Chosen(codes, torch.zeros_like(Wt), [], Wt.new_zeros(Wt.shape[1]))
    for low in range(0, len(Wt), columns.span):
        part = slice(low, min(low + columns.span, len(Wt)))
        E = chosen.E[part]
        if low:
            add_product(E, U[..., :low, part].mT, chosen.E[:low])
        given = Wt[part], U[..., part, part].contiguous(), D[..., part]
        own = fixed[low // grid.group_size : part.stop // grid.group_size]
        changed = E, codes[part], chosen.lost
        if replays is None or grid.vector_size > 1:
            chosen.params += columns.solve(*changed, *given, own)
        else:
            chosen.params += replays(columns.solve, ("sweep", grid), changed, given, own)
    return chosen


def picked(rows: Tensor, order: Tensor) -> Tensor:
    """Return the rows `[(sites,) n, ...]` in this order `[(sites,) n]`."""
    if order.ndim == 1:
        return rows.contiguous().index_select(0, order)
    first = len(order[0]) * torch.arange(len(order), device=order.device)
    return rows.flatten(0, 1).index_select(0, (order + first[:, None]).flatten()).view(rows.shape)


def places(order: Tensor, grid: Grid) -> Tensor:
    """Return the original number of each group, for groups that were moved as a whole."""
    return order[..., :: grid.group_size] // grid.group_size


def assembled(
    codes: Tensor, params: list, order: Tensor, grid: Grid, act_order: str
) -> list[QuantizedWeight]:
    """Return each site's weight from codes `[in, sites * out]` and group parameters, columns in their old
    order. order: `[(sites,) in]`."""
    order = order.view(-1, len(codes))
    back, groups, sites = torch.argsort(order), torch.argsort(places(order, grid)), range(len(order))
    column_group = [back[k] // grid.group_size if act_order == "full" else None for k in sites]
    if act_order == "full":
        groups = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
    whole = regrouped(join(params), groups)
    codes = picked(codes.unflatten(1, (len(order), -1)).movedim(1, 0), back).mT.contiguous()
    return [QuantizedWeight(grid, codes[k], rows_of(whole, k), column_group[k]) for k in sites]


def column_order(diagonal: Tensor, grid: Grid, act_order: str) -> Tensor:
    """Return the order `[..., in]` in which columns are quantized, from the Hessians' diagonals."""
    columns = torch.arange(diagonal.shape[-1], device=diagonal.device).expand_as(diagonal)
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
    parts = diagonal.unflatten(-1, (-1, grid.sub_size))  # in a sub-block: columns that share all parameters
    inside = torch.argsort(parts, descending=True, stable=True)
    if grid.vector_size > 1:  # the columns of a vector belong together
        inside = torch.arange(grid.sub_size, device=parts.device).expand_as(parts)
    means = diagonal.unflatten(-1, (-1, grid.group_size)).mean(-1)
    groups = torch.argsort(means, descending=True, stable=True)
    columns = columns.unflatten(-1, (-1, grid.sub_size)).gather(-1, inside).view(*means.shape, -1)
    return picked(columns, groups).flatten(-2)


def factorize(hessian: Tensor, damp: float, order: Tensor) -> tuple[Tensor | None, Tensor, str | None]:
    """Return upper triangular A with `A Aᵀ = damped(hessian, order, damping)`, without a copy of H on top;
    that damping, `[(sites,) 1]`; and a note if damping had to grow.

    Adds `damp * mean(diag H)` to the diagonal, and ten times as much, at most five times, until H is positive
    definite; if that fails, A is None and the note gives the reason. A column that no token reached has only
    damping, so it is rounded to nearest. Several Hessians `[sites, in, in]` are damped once: if one of them
    needs more, A is None.
    """
    mean = hessian.diagonal(dim1=-2, dim2=-1).gather(-1, order).mean(-1, keepdim=True)
    mean += mean == 0  # no token reached any column: every choice is as good, nearest is natural
    info = torch.empty(hessian.shape[:-2], dtype=torch.int32, device=hessian.device)
    for attempt in range(DAMP_RETRIES + 1 if hessian.ndim == 2 else 1):
        share = damp * 10**attempt
        lower = damped(hessian.mT, order.flip(-1), share * mean).mT  # columns are contiguous, as LAPACK wants
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        if not info.any() and torch.isfinite(lower.diagonal(dim1=-2, dim2=-1)).all():
            return reverse(lower.mT).mT, share * mean, f"damping raised to {share:g}" if attempt else None
    return None, share * mean, f"Hessian is not positive definite even with damping {share:g}"


def damped(hessian: Tensor, order: Tensor, damping: Tensor) -> Tensor:
    """Return a copy of H with rows and columns in `order [(sites,) in]` and a damped diagonal."""
    sites = () if order.ndim == 1 else (torch.arange(len(order), device=order.device)[:, None, None],)
    found = hessian[(*sites, order[..., :, None], order[..., None, :])]
    found.diagonal(dim1=-2, dim2=-1).add_(damping)
    return found


def reverse(matrices: Tensor) -> Tensor:
    """Return `[(sites,) n, n]` after reversing rows and columns in place, a few rows at a time."""
    size, width = matrices.shape[-1], max(128, matrices.shape[-1] // 8)
    for start in range(0, (size + 1) // 2, width):
        stop = min(start + width, (size + 1) // 2)
        first, last = matrices[..., start:stop, :], matrices[..., size - stop : size - start, :]
        first[...], last[...] = last.flip(-2, -1), first.flip(-2, -1)
    return matrices


CANCELLED = 0.02  # least share of the undamped loss in the damped loss: below, digits cancel


@dataclass(frozen=True)
class Attempt:
    """The result for linears of a site, or of several. weights: of each site; empty if a Hessian has no
    factorization; note gives the reason. lost: of every row, `e H eᵀ` with the damped H, and the damping's
    part, `[2, sites, out]`. clipped: whether some scales are at the limits of their dtype."""

    weights: list[QuantizedWeight]
    lost: Tensor | None
    note: str | None
    clipped: bool = False


def _better(attempt: Attempt, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> list[Solved]:
    """Return, for each site, an attempt's rows of one linear, or round to nearest if that has a lower loss on
    a sample."""
    some = slice(None) if grid.spans_matrix else measured(weight.shape[-2])
    part = weight[..., some, :]
    every = part.flatten(0, -2)
    nearest = rtn.missed(every, grid, rtn.fitted(every, grid, hessian)).view(part.shape)
    sums = [row_losses(each, hessian).sum(-1).view(-1) for each in (part, nearest)]
    if attempt.weights:
        sums += attempt.lost[..., rows][..., some].sum(-1)
    solved, sites = [], (each.view(-1, *each.shape[-2:]) for each in (weight, hessian))
    found = zip(*sites, torch.stack(sums, 1).tolist(), strict=True)
    for k, (weight, hessian, (full, rtn_loss, *lost)) in enumerate(found):
        scale = max(full, 1e-30)
        rtn_error, reason = rtn_loss / scale, attempt.note
        notes = ()
        if attempt.weights:
            notes = (attempt.note,) if attempt.note else ()
            chosen = attempt.weights[k]
            chosen = replace(chosen, codes=chosen.codes[rows], params=rows_of(chosen.params, rows))
            damped, damping = lost
            error = (damped - damping) / scale
            if not damped - damping > CANCELLED * damped:  # too little is left of their digits
                error = row_losses(chosen.values()[some] - weight[some], hessian).sum().item() / scale
            if error <= rtn_error:  # not a number loses, too
                notes += clipping(chosen) if attempt.clipped else ()
                solved.append(Solved(chosen, error, rtn_error, notes=notes))
                continue
            reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
        baseline = rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian))
        notes += clipping(baseline)
        solved.append(Solved(baseline, rtn_error, rtn_error, fallback=reason, notes=notes))
    return solved
