"""An experiment: the columns of a run, in GPTQ's sweep and in its refinement, as one Triton kernel.

quantkit does not use this. `plugged()` lets `GptqSolver` use it, `scripts/gpu_day` measures it. In units of
the step both loops are the same. At its turn column j is rounded to the nearest level, and the change d of
its level moves the columns after it: `T_i -= C_ji d`. In the sweep C is U and levels were 0 before; in the
refinement C is H. A program has a block of rows and goes through all columns.

Without a GPU, `TRITON_INTERPRET=1`, set before this file is imported, runs the kernel in numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.grids.affine import AffineGrid
from quantkit.quantize.solvers import gptq, refine
from quantkit.quantize.solvers.columns import Columns

WIDTH = 128  # columns of a launch, at most
BLOCKS, WARPS = (8, 16, 32), (1, 4)  # rows of a program; what is tried where the kernel is measured


@triton.jit
def chain(
    targets, levels, coupling, rows, size, most,
    DESCENT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose `levels` in 0..most near `targets`, both float32 `[groups, size, rows]`, column by column.

    targets: each column's as it is before any other column of the run moved; afterwards as it was at its
    turn. coupling: `[groups, size, size]`, row j moves the targets of the columns after j. DESCENT: levels
    have values, else they are taken as 0. SIZE: size, or the next power of two.
    """
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, SIZE)
    own = levels + group * size * rows
    places = group * size * rows + column[:, None] * rows + row[None, :]
    inside = (column[:, None] < size) & (row[None, :] < rows)
    tile = tl.load(targets + places, mask=inside, other=0.0)
    if DESCENT:
        old = tl.load(levels + places, mask=inside, other=0.0)
    for j in range(0, size):
        mine = (column == j)[:, None]
        target = tl.sum(tl.where(mine, tile, 0.0), axis=0)
        level = tl.minimum(tl.maximum(target, 0.0), most)
        level = (level + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
        moved = level
        if DESCENT:
            moved -= tl.sum(tl.where(mine, old, 0.0), axis=0)
        others = tl.load(coupling + (group * size + j) * size + column, mask=column < size, other=0.0)
        tile -= tl.where((column > j)[:, None], others[:, None] * moved[None, :], 0.0)
        tl.store(own + j * rows + row, level, mask=row < rows)
    tl.store(targets + places, tile, mask=inside)


def run_chain(
    targets: Tensor, levels: Tensor, coupling: Tensor, most: int, descent: bool, block: int, warps: int
) -> None:
    """Launch `chain` once for contiguous tensors."""
    groups, size, rows = targets.shape
    assert targets.is_contiguous() and levels.is_contiguous() and coupling.is_contiguous()
    chain[(triton.cdiv(rows, block), groups)](
        targets, levels, coupling, rows, size, float(most),
        DESCENT=descent, SIZE=triton.next_power_of_2(size), BLOCK=block, num_warps=warps,
    )  # fmt: skip


class TritonColumns(Columns):
    """The sweep with one launch for up to WIDTH columns."""

    block, warps = 16, 4

    def __init__(self, Wt: Tensor, U: Tensor, D: Tensor, grid: AffineGrid):
        assert isinstance(grid, AffineGrid), "the kernel rounds to whole numbers"
        super().__init__(Wt, U, D, grid)
        self.width = WIDTH

    def _choose(self, columns: slice, step: Tensor, low: Tensor) -> None:
        for run in self._runs(columns):
            self.update(run)
            chosen = self.chosen
            E = chosen.E[run]
            raised = self.Wt[run] + low
            targets = torch.addmm(E, self.U[run, run].t(), raised).div_(step)
            levels = torch.empty_like(targets)
            coupling = self.U[run, run].contiguous()
            most = self.grid.max_code
            run_chain(targets[None], levels[None], coupling[None], most, False, self.block, self.warps)
            self.grid.codes(levels, chosen.codes[run])
            torch.addcmul(raised, levels, step, value=-1, out=E)
            squares = targets.sub_(levels).mul_(step).square_()
            chosen.lost.addmv_(squares.t(), self.D[run])


class TritonVisit(refine._Visit):
    """The refinement with one launch for a run of columns of both groups."""

    block, warps = 16, 4

    def _descend(self) -> None:
        size, sub = self.levels.shape[1], self.grid.sub_size
        coupling = self.own.mT
        low = 0
        while low < size:
            high = min(low + refine.RUN, (low // sub + 1) * sub)
            run, step = slice(low, high), self.step[:, low // sub, None]
            old = self.levels[:, run]
            levels = old.clone(memory_format=torch.contiguous_format)
            targets = (self.residual[:, run] / step).add_(old)
            feed = coupling[:, run, run].contiguous()
            run_chain(targets, levels, feed, self.grid.max_code, True, self.block, self.warps)
            moved = torch.sub(levels, old).mul_(step)
            if len(self.groups) == 2:
                keep = self._agreed(run, moved)[:, None]
                torch.where(keep, levels, old, out=levels)
                moved.mul_(keep)
            self.levels[:, run] = levels
            self._follow(run, moved)
            low = high


@contextmanager
def plugged(block: int = 16, warps: int = 4) -> Iterator[None]:
    """`GptqSolver` uses the kernel, on affine grids."""
    kinds = (
        type(kind.__name__, (kind,), {"block": block, "warps": warps})
        for kind in (TritonColumns, TritonVisit)
    )
    columns, visit = kinds
    with mock.patch.object(gptq, "Columns", columns), mock.patch.object(refine, "_Visit", visit):
        yield
