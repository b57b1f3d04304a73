"""Several matrices of the same shape, such as those of experts, in one product.

Matrices share kernel launches: `[columns, matrices * out]` has the rows of all, and each matrix has a factor
of its own, `[matrices, columns, columns]`. One matrix has the factor `[columns, columns]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.grids.grid import Grid


def can_stack(weights: Sequence[Sequence[Tensor]], grids: Sequence[Sequence[Grid]]) -> bool:
    """Return whether sites with these linears have equal shapes and grids, and grids that fit the groups of
    several matrices at once."""
    sites = {(*site_grids, *(w.shape for w in site)) for site_grids, site in zip(grids, weights, strict=True)}
    several = all(g.many and g.sub_size == g.group_size and not g.spans_matrix for g in grids[0])
    return several and len(sites) == 1 < len(weights)


def by_matrix(rows: Tensor, factor: Tensor) -> Tensor:
    """Return `rows [columns, matrices * out]` as `[matrices, columns, out]` if every matrix has a factor."""
    return rows if factor.ndim == 2 else rows.unflatten(1, (len(factor), -1)).movedim(1, 0)


def as_batch(matrices: Tensor) -> Tensor:
    """Return `[matrices, …, …]`; a single matrix becomes a batch of one."""
    return matrices if matrices.ndim == 3 else matrices[None]


def add_product(total: Tensor, factor: Tensor, rows: Tensor) -> Tensor:
    """Add `factor @ rows` to `total` in place, for each matrix; return `total`."""
    add = Tensor.addmm_ if factor.ndim == 2 else Tensor.baddbmm_
    add(by_matrix(total, factor), factor, by_matrix(rows, factor))
    return total


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    """Return the rows `[(sites,) n, ...]` in this order `[(sites,) n]`."""
    if order.ndim == 1:
        return rows.contiguous().index_select(0, order)
    first = len(order[0]) * torch.arange(len(order), device=order.device)
    return rows.flatten(0, 1).index_select(0, (order + first[:, None]).flatten()).view(rows.shape)
