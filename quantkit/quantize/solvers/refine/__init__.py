"""Refinement: coordinate descent on codes and scales, starting from the result of the sweep.

The sweep fixes each column before it knows the later columns. Once all columns are chosen, any of them can be
chosen again (cyclic coordinate descent, as in QuantEase, Behdin et al. 2023, arXiv:2309.01885, section 3).
With the residual `R = H Eᵀ`, the loss `tr(E H Eᵀ)` along column j is least at `ŵ_j + R_j / H_jj`, so moving
to the nearest grid value never raises the loss. Likewise, a group's values `V` have a best common factor,
`1 + <R, V> / <V, H V>`, which is multiplied into the scale.

A visit of a group moves its columns, then its scales. What may move at once differs, and so do the products
that keep the residual up to date:

| file | moves | rows of W |
| --- | --- | --- |
| `by_column.py` | the same columns of two groups, and of several matrices | independent |
| `by_vector.py` | vectors of a code book, then the scale of each sub-block | independent |
| `both_sides.py` | a column in many rows, for the loss `tr(G E H Eᵀ)` of YAQA | coupled by G |
"""

from torch import Tensor

from quantkit.grids.grid import Grid
from quantkit.quantize.solvers.columns import Chosen
from quantkit.quantize.solvers.refine import by_column, by_vector
from quantkit.quantize.solvers.replay import Replays


def refine(
    Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int, replays: Replays | None = None
) -> None:
    """Improve codes and parameters for `Wt [in, out]` in place, with the same grid and number of bytes.

    hessian: `[in, in]`, or `[matrices, in, in]` for `Wt [in, matrices * out]`; damped, in the same column
    order; changed in place. cycles: visits of each group. (If scales are only chosen in the last visit, the
    loss is 0.2 percent higher, but the KL divergence of the bundled model in 2 bits is 3 percent higher.)
    """
    if grid.vector_size == 1:
        by_column.refine(Wt, chosen, grid, hessian, cycles, replays)
    else:
        by_vector.refine(chosen, grid, hessian, cycles)
