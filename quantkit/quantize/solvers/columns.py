"""The columns of GPTQ's sweep, fast: updated in batches, and chosen in units of their group's step.

Works on `Wᵀ`, where a column of W is contiguous. At its turn column j is rounded from
`t_j = w_j + Σ_{k<j} E_k U_kj`. In a run of columns r.. with one step, `E_k = w_k + low - step * level_k`, and

    (t_j + low) / step = (Σ_{k<r} E_k U_kj + Σ_{r<=k<=j} (w_k + low) U_kj) / step - Σ_{r<=k<j} level_k U_kj

One matrix product gives all but the last sum. Each column then needs only a matrix-vector product with the
levels chosen before it, and a rounding without parameters: three kernel launches. Matrices of the same shape
share the launches: `Wt [in, matrices * out]` has the rows of all, and each has its own U.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.affine import AffineGrid
from quantkit.grids.grid import Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.grids.parallel import rows_at_once
from quantkit.models.machine.device import triton_kernel
from quantkit.quantize.solvers.batching import add_product, as_batch, by_matrix

BATCH = 128  # columns between two lazy updates; the paper's B
RUN, LONG_RUN = 32, 128  # minimum and maximum run updated column by column
RUN_TEMPORARIES = 4  # tensors of the size of a run
TINY = torch.finfo(torch.float32).tiny


def chain_for(device: torch.device, grid: Grid) -> Callable[..., None] | None:
    """Return the kernel that chooses a run of columns at once (`chain.py`); None if there is none."""
    if device.type != "cuda" or not grid.limits:
        return None
    return triton_kernel(device, _loaded)


def _loaded(device: torch.device) -> Callable[..., None]:
    """Import the kernel and try its longest run: levels that are computed, and levels from a table."""
    from quantkit.quantize.solvers.chain import chain

    for tried in (AffineGrid(4, LONG_RUN), Nf4Grid()):
        chain(*torch.zeros(3, 1, LONG_RUN, LONG_RUN, device=device), tried)
    return chain


@dataclass
class Chosen:
    """The choice for the columns of a site, or of several in turn, in the solver's order.

    codes: uint8 `[in, out]`. E: `W - Ŵ`, `[in, out]`. params: parameters of each group. lost: `e H eᵀ` of
    every row with the damped H, `[out]`.
    """

    codes: Tensor
    E: Tensor
    params: list
    lost: Tensor


class Columns:
    """Chooses the columns of `Wt [in, (matrices *) out]`, `span` columns at a time; U `[(matrices,) in, in]`
    with `H = U diag(D) Uᵀ`.

    A run has at most `width` columns. Its buffers and their views are allocated once: `ideal` and `levels`,
    `[width, (matrices *) out]`, and `feed`, the run's part of Uᵀ. turns: for each column of a run, its rows
    of `ideal` and `levels`, and the call that corrects its ideal by the levels of the columns before it.
    """

    def __init__(self, Wt: Tensor, U: Tensor, grid: Grid):
        self.grid, self.chain, size = grid, chain_for(Wt.device, grid), grid.group_size
        self.span = max(size, BATCH // size * size)  # whole groups
        self.whole = size == len(Wt)  # a row is one group
        rows = by_matrix(Wt, U).shape[-1]  # per matrix: results must not depend on other matrices
        self.width = min(max(rows_at_once(Wt.device, rows, RUN_TEMPORARIES), RUN), LONG_RUN)
        self.ideal, self.levels = Wt.new_empty(2, self.width, Wt.shape[1])
        self.feed = feed = Wt.new_empty(*U.shape[:-2], self.width, self.width)
        ideal, before = by_matrix(self.ideal, U), by_matrix(self.levels, U)
        if U.ndim == 2:  # a matrix-vector product is faster on a CPU
            products = [(ideal[k].addmv_, before.t()[:, :k], feed[k, :k]) for k in range(self.width)]
        else:
            products = [
                (ideal[:, k, None].baddbmm_, feed[:, k, None, :k], before[:, :k]) for k in range(self.width)
            ]
        corrections = [partial(*product, alpha=-1) for product in products]
        self.turns = list(zip(self.ideal, self.levels, corrections, strict=True))

    def solve(
        self, E: Tensor, codes: Tensor, lost: Tensor, Wt: Tensor, U: Tensor, D: Tensor, fixed: Sequence
    ) -> list:
        """Choose the columns of a span, `Wt [columns, (matrices *) out]`; return its groups' parameters.

        E: on entry `Σ E_k U_kj` over all earlier spans, on return the errors. codes: uint8 output. lost:
        `[out]`, grows by the span's loss. U `[(matrices,) columns, columns]`, D `[(matrices,) columns]`.
        fixed: the groups' parameters if `grid.spans_matrix`; others are fitted when the sweep reaches them.
        """
        self.E, self.codes, self.lost, self.Wt, self.U, self.D = E, codes, lost, Wt, U, D
        self.counted = [0] * len(Wt)  # by column: how many earlier columns' errors E includes
        groups, size, sub_size = [], self.grid.group_size, self.grid.sub_size
        for start in range(0, len(Wt), size):
            group = slice(start, start + size)
            self.update(group)
            if self.grid.spans_matrix:
                params = fixed[len(groups)]
            else:
                params = self.grid.fit(self.free(group).t(), D[..., group])
            for k in range(size // sub_size):
                columns = slice(start + k * sub_size, start + (k + 1) * sub_size)
                params = self.choose(columns, k, params)
            groups.append(params)
        return groups

    def update(self, columns: slice) -> None:
        """Add the errors of the span's earlier columns to these columns; at the beginning of a batch, to the
        whole batch (section 3.3, step 2)."""
        low, high = columns.start, columns.stop
        if low % BATCH == 0:
            high = max(high, min(low + BATCH, len(self.Wt)))
        since = self.counted[low]
        if since < low:
            add_product(self.E[low:high], self.U[..., since:low, low:high].mT, self.E[since:low])
        self.counted[low:high] = [low] * (high - low)

    def free(self, columns: slice) -> Tensor:
        """Return the best values of `columns` without rounding to the grid, given the errors before them."""
        if self.whole and not columns.start:  # no errors yet, and an inverse as large as the Hessian
            return self.Wt[columns]
        Wt, U = self.Wt[columns], self.U[..., columns, columns]
        identity = torch.eye(len(Wt), device=U.device)
        inverse = torch.linalg.solve_triangular(U, identity, upper=True, unitriangular=True)
        return add_product(Wt.clone(), inverse.mT, self.E[columns])

    def choose(self, columns: slice, k: int, params: Any) -> Any:
        """Choose codes, errors and loss of `columns`, sub-block k of a group; return the group's parameters.
        Sub-blocks after the first fit theirs again, with the errors of earlier columns added."""
        if k and not self.grid.spans_matrix:
            self.update(columns)
            params = self.grid.refit(self.free(columns), params, k, self.D[..., columns])
        step, low = (sub_blocks[k] for sub_blocks in self.grid.steps(params))
        start = columns.start
        while start < columns.stop:  # a run ends with its batch
            run = slice(start, min(start + self.width, start // BATCH * BATCH + BATCH, columns.stop))
            self.update(run)
            U, size = self.U[..., run, run], run.stop - run.start
            ideal, levels = self.ideal[:size], self.levels[:size]
            raised = self.Wt[run] + low
            add_product(ideal.copy_(self.E[run]), U.mT, raised).div_(step)
            if self.chain:
                targets, new_levels = (as_batch(by_matrix(x, U)) for x in (ideal, levels.zero_()))
                self.chain(targets, new_levels, as_batch(U).contiguous(), self.grid)
            else:
                self.feed[..., :size, :size].copy_(U.mT)
                for j, (column, level, correct) in enumerate(self.turns[:size]):
                    if j:
                        correct()
                    self.grid.snap(column, level)
            self.grid.codes(levels, self.codes[run])
            torch.addcmul(raised, levels, step, value=-1, out=self.E[run])
            squares = ideal.sub_(levels).mul_(step).square_()
            add_product(self.lost[None], self.D[..., None, run], squares)
            start = run.stop
        return params


def values_of(levels: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """Return `step * level - low`, `[..., group_size, out]`; step, low: `[..., sub-blocks, out]`."""
    values = levels.unflatten(-2, (step.shape[-2], -1)) * step.unsqueeze(-2)
    return values.sub_(low.unsqueeze(-2)).flatten(-3, -2)


def best_factor(along: Tensor, power: Tensor) -> Tensor:
    """Return the best factor of values V, from `<R, V>` and `<V, H V>`; 1 if it is not above 0."""
    factor = 1 + along / power.clamp(min=TINY)
    return torch.where((power > 0) & (factor > 0), factor, 1.0)
