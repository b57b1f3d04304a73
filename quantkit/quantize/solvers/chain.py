"""The columns of a run in one launch, for CUDA devices with Triton.

In units of the step, GPTQ's sweep and its refinement do the same with a column: at its turn it is rounded to
the nearest level, and the change d of its level moves the columns after it, `T_i -= C_ji d`. In the sweep C
is U and all levels were 0; in the refinement C is H. A program keeps a block of rows in registers and goes
through all columns. torch's own kernels do the same in three launches a column; the order of sums differs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.grids.grid import Grid

BLOCK, WARPS = 16, 1  # rows of a program; of eight choices the fastest for 4,096 and 28,672 rows on an H200


@triton.jit
def _chain(
    targets, levels, coupling, table, rows, size, target_group, target_column, level_group, level_column,
    coupling_group, coupling_column, low, high, length,
    TABLE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `chain`. TABLE: levels come from a table of `length`. SIZE: size, or the next power of two."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, SIZE)
    inside = (column[:, None] < size) & (row[None, :] < rows)
    targets += group * target_group + column[:, None] * target_column + row[None, :]
    own = levels + group * level_group
    tile = tl.load(targets, mask=inside, other=0.0)
    for j in range(0, size):
        mine = (column == j)[:, None]
        target = tl.sum(tl.where(mine, tile, 0.0), axis=0)
        level = tl.minimum(tl.maximum(target, low), high)
        if TABLE:
            place = level.to(tl.int32)  # rounds towards zero
            level = tl.load(table + tl.where(place < 0, place + length, place))
        else:
            level = (level + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
        moved = level - tl.load(own + j * level_column + row, mask=row < rows, other=0.0)
        feed = coupling + group * coupling_group + j * coupling_column
        others = tl.load(feed + column, mask=column < size, other=0.0)
        tile -= tl.where((column > j)[:, None], others[:, None] * moved[None, :], 0.0)
        tl.store(own + j * level_column + row, level, mask=row < rows)
    tl.store(targets, tile, mask=inside)


def chain(targets: Tensor, levels: Tensor, coupling: Tensor, grid: Grid) -> None:
    """Choose `levels` near `targets`, both float32 `[groups, size, rows]`, column by column, in place.

    targets: each column's before any column of the run moves; afterwards, as it was at its turn. coupling:
    `[groups, size, size]`, row j moves the targets of the columns after j.
    """
    groups, size, rows = targets.shape
    assert targets.stride(2) == levels.stride(2) == coupling.stride(2) == 1
    table, (low, high) = grid.level_places(targets.device), grid.limits
    _chain[(triton.cdiv(rows, BLOCK), groups)](
        targets, levels, coupling, targets if table is None else table, rows, size,
        *targets.stride()[:2], *levels.stride()[:2], *coupling.stride()[:2],
        float(low), float(high), 0 if table is None else len(table),
        TABLE=table is not None, SIZE=triton.next_power_of_2(size), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
