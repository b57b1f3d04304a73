"""The sweep of GPTQ over the columns of a site: every column once, each moved to make up for those before it.

Works on `Wᵀ`, where a column is contiguous, and in units of the step of a column's group: with
`B = A / diag A` the target of column j is `w_j + Σ_{k<j} (w_k - ŵ_k) B_kj`. Inside a run of columns that
share a step the part of w is one matrix product, and a column takes a matrix-vector product with the levels
chosen before it and a rounding that knows no parameters: three launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.grid import Grid
from quantkit.grids.parallel import elements_at_once

BLOCK = 128  # columns between two lazy updates; the paper's B
RUN = 32  # columns inside which a column is brought up to date by a matrix-vector product: at least, at most
LONG_RUN = 128
TEMPORARIES = 4  # of the size of a run


@dataclass
class Chosen:
    """What was chosen for the columns of a site, in the order of the solver.

    codes: uint8 `[in, out]`. delta: `W - Ŵ`, `[in, out]`. params: of each group. lost: `dw H dwᵀ` of every
    row with the damped H, `[out]`.
    """

    codes: Tensor
    delta: Tensor
    params: list
    lost: Tensor


def sweep(target: Tensor, grid: Grid, factor: Tensor, fixed: list | None = None) -> Chosen:
    """Quantize the columns `target [in, out]` in order with error feedback through `factor` (A, used up).

    A group has parameters `fixed`, or they are fitted when the sweep gets to it, and to each of its
    sub-blocks. Its range is searched with the pivots `A_jj²` as importance: what a rounding error in column j
    costs once the columns behind it have made up for what they can (the bare diagonal of H counts it as if
    they could not, and gave 5 percent more KL divergence on the demo model, 2 after refinement). The loss is
    their sum, too: `|dW A|²`, a column at a time.
    """
    importance = factor.diagonal().square()
    factor.div_(factor.diagonal().clone())  # B
    chosen = Chosen(
        codes=torch.empty(target.shape, dtype=torch.uint8, device=target.device),
        # before column j is chosen: Σ over finished columns k of delta_k B_kj
        delta=torch.zeros_like(target),
        params=[],
        lost=target.new_zeros(target.shape[1]),
    )
    delta, params, size = chosen.delta, chosen.params, grid.group_size
    columns = _Columns(grid, target, chosen)
    for start, end in blocks(len(target), size):
        opens = start % size == 0  # a group as a whole learns of the errors before it is fitted
        since, until = (0, max(end, start + size)) if opens else (start // size * size, end)
        _carry(delta, factor, since, start, until)
        for low, high in runs(start, end, grid.sub_size, columns.width):
            opens = low % size == 0
            since, until = (start, min(end, low + size)) if opens else (max(start, low // size * size), high)
            _carry(delta, factor, since, low, until)
            if opens and fixed:
                params.append(fixed[low // size])
            elif opens:
                wanted = _freely(target, delta, factor, slice(low, low + size))
                params.append(grid.fit(wanted.t(), importance[low : low + size]))
            elif low % grid.sub_size == 0 and not fixed:
                span = slice(low, low + grid.sub_size)
                wanted, k = _freely(target, delta, factor, span), low % size // grid.sub_size
                params[-1] = grid.refit(wanted, params[-1], k, importance[span])
            if low % grid.sub_size == 0:
                step, bottom = (part[low % size // grid.sub_size] for part in grid.steps(params[-1]))
            columns.choose(slice(low, high), factor[low:high, low:high], importance[low:high], step, bottom)
    return chosen


def _carry(delta: Tensor, factor: Tensor, since: int, low: int, until: int) -> None:
    """Columns low to until learn of the errors from `since` on."""
    if low > since:
        delta[low:until].addmm_(factor[since:low, low:until].t(), delta[since:low])


def _freely(target: Tensor, carry: Tensor, factor: Tensor, span: slice) -> Tensor:
    """Where the columns of a group would go, given the errors before it, if they could take any value."""
    if not span.start:
        return target[span]
    own = factor[span, span]
    identity = torch.eye(len(own), device=own.device)
    inverse = torch.linalg.solve_triangular(own, identity, upper=True, unitriangular=True)
    return torch.addmm(target[span], inverse.t(), carry[span])


class _Columns:
    """Chooses runs of columns. What a run works on stays where it is, and so do the views of it."""

    def __init__(self, grid: Grid, target: Tensor, chosen: Chosen):
        self.grid, self.target, self.chosen = grid, target, chosen
        rows = target.shape[1]
        self.width = min(max(elements_at_once(target.device, TEMPORARIES) // rows, RUN), LONG_RUN)
        self.wanted, self.levels = target.new_empty(2, self.width, rows)
        self.feed = target.new_empty(self.width, self.width)
        befores, feeds = self.levels.t(), self.feed.unbind()
        self.columns = [
            (k, wanted, level, befores[:, :k], feeds[k][:k])
            for k, (wanted, level) in enumerate(zip(self.wanted, self.levels, strict=True))
        ]

    def choose(self, run: slice, factor: Tensor, importance: Tensor, step: Tensor, low: Tensor) -> None:
        """Codes, errors and loss of the columns `run`; factor and importance are the run's own."""
        width, chosen = len(factor), self.chosen
        wanted, levels, delta = self.wanted[:width], self.levels[:width], chosen.delta[run]
        self.feed[:width, :width].copy_(factor.t())
        raised = self.target[run] + low
        torch.addmm(delta, factor.t(), raised, out=wanted).div_(step)
        snap = self.grid.snap
        for k, column, level, before, feed in self.columns[:width]:
            if k:
                column.addmv_(before, feed, alpha=-1)
            snap(column, level)
        self.grid.codes(levels, chosen.codes[run])
        torch.addcmul(raised, levels, step, value=-1, out=delta)
        squares = wanted.sub_(levels).mul_(step).square_()
        chosen.lost.addmv_(squares.t(), importance)


def blocks(in_features: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Column ranges between lazy updates: about BLOCK wide, never crossing into a new group midway."""
    width = group_size if group_size > BLOCK else BLOCK // group_size * group_size
    for start in range(0, in_features, width):
        end = min(start + width, in_features)
        for low in range(start, end, BLOCK):
            yield low, min(low + BLOCK, end)


def runs(start: int, end: int, sub_size: int, width: int) -> Iterator[tuple[int, int]]:
    """The parts of a block that share one step each, at most `width` wide."""
    low = start
    while low < end:
        high = min(end, (low // sub_size + 1) * sub_size, low + width)
        yield low, high
        low = high
