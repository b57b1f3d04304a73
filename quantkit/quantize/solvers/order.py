"""The order in which error feedback quantizes columns, and the way back.

Columns with large inputs are better quantized first. `full` sorts all columns, so groups are scattered over
the matrix and the client needs `g_idx`. `group` sorts the groups and the columns inside each group, so the
file's format stays the same.
"""

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight, join, regrouped
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers.batching import reordered


def column_order(diagonal: Tensor, grid: Grid, act_order: str) -> Tensor:
    """Return the order `[..., in]` in which columns are quantized, from the Hessians' diagonals."""
    columns = torch.arange(diagonal.shape[-1], device=diagonal.device).expand_as(diagonal)
    if act_order == "none":
        return columns
    if act_order == "full":
        assert not grid.spans_matrix and grid.sub_size == grid.group_size, "columns have fixed places"
        return torch.argsort(diagonal, descending=True, stable=True)
    sub_blocks = diagonal.unflatten(-1, (-1, grid.sub_size))  # columns that share all parameters
    inside = torch.argsort(sub_blocks, descending=True, stable=True)
    if grid.vector_size > 1:  # the columns of a vector belong together
        inside = torch.arange(grid.sub_size, device=sub_blocks.device).expand_as(sub_blocks)
    means = diagonal.unflatten(-1, (-1, grid.group_size)).mean(-1)
    groups = torch.argsort(means, descending=True, stable=True)
    columns = columns.unflatten(-1, (-1, grid.sub_size)).gather(-1, inside).view(*means.shape, -1)
    return reordered(columns, groups).flatten(-2)


def group_order(order: Tensor, grid: Grid) -> Tensor:
    """Return the original number of each group, for groups that were moved as a whole."""
    return order[..., :: grid.group_size] // grid.group_size


def restored(codes: Tensor, params: list, order: Tensor, grid: Grid, act_order: str) -> list[QuantizedWeight]:
    """Return each site's weight, columns in their original order, from codes `[in, sites * out]` and the
    parameters of the groups. order: `[(sites,) in]`."""
    order = order.view(-1, len(codes))
    back = torch.argsort(order)
    codes = reordered(codes.unflatten(1, (len(order), -1)).movedim(1, 0), back).mT.contiguous()
    if act_order == "full":  # groups stay in the solver's order, and columns say which group is theirs
        groups = torch.arange(len(params), device=order.device).expand(len(order), -1)
        column_groups = [columns // grid.group_size for columns in back]
    else:
        groups, column_groups = torch.argsort(group_order(order, grid)), [None] * len(order)
    matrices = regrouped(join(params), groups)
    sites = zip(codes, column_groups, strict=True)
    return [QuantizedWeight(grid, c, rows_of(matrices, k), group) for k, (c, group) in enumerate(sites)]
