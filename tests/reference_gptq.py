"""GPTQ as its paper writes it down, slowly, in float64: arXiv:2210.17323, equations 2 and 3.

The inverse Hessian is explicit, every column's error updates all remaining columns at once, and a
finished column is eliminated from the inverse by one Gaussian step: no Cholesky factor, no blocks.
The grid alone is quantkit's, so a comparison tests the error feedback and nothing else.
"""

import torch
from torch import Tensor

from quantkit.grids import QuantizedWeight
from quantkit.grids.affine import AffineGrid, AffineParams


def order_of(diagonal: list[float], group_size: int, act_order: str) -> list[int]:
    """Columns in the order they are quantized: largest inputs first, wherever `act_order` allows it."""

    def largest_first(columns):
        return sorted(columns, key=lambda column: -diagonal[column])  # stable

    if act_order == "none":
        return list(range(len(diagonal)))
    if act_order == "full":
        return largest_first(range(len(diagonal)))
    starts = range(0, len(diagonal), group_size)
    groups = [range(start, start + group_size) for start in starts]
    groups.sort(key=lambda group: -sum(diagonal[column] for column in group))
    return [column for group in groups for column in largest_first(group)]


def pivots(inverse: Tensor) -> Tensor:
    """`1 / [H⁻¹]_qq` of each column at its turn: what equation 2 divides its squared error by."""
    inverse, found = inverse.clone(), []
    for q in range(len(inverse)):
        found.append(1 / inverse[q, q])
        inverse -= torch.outer(inverse[:, q], inverse[q, :]) / inverse[q, q]
    return torch.stack(found)


def gptq(
    weight: Tensor, hessian: Tensor, grid: AffineGrid, damp: float = 0.01, act_order: str = "none"
) -> QuantizedWeight:
    """Quantize `weight [out, in]` under `hessian [in, in]`; both of any float type.

    A group's parameters are fitted when its first column is reached, on columns compensated so far.
    """
    hessian = hessian.double()
    order = order_of(hessian.diagonal().tolist(), grid.group_size, act_order)
    weight = weight.double()[:, order].clone()
    hessian = hessian[order][:, order]
    columns = len(order)

    hessian = hessian + damp * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    importance = pivots(inverse)

    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    column_group = torch.zeros(columns, dtype=torch.int64)
    scales, zeros = [], []
    for q in range(columns):
        if q % grid.group_size == 0:
            group = slice(q, q + grid.group_size)
            params = grid.fit(weight[:, group], importance[group])
            scales.append(params.scale)
            zeros.append(params.zero)
        column_codes, values = grid.round_column(weight[:, q], params, q % grid.group_size)
        codes[:, order[q]] = column_codes.to(torch.uint8)
        column_group[order[q]] = len(scales) - 1
        # Equation 2: the error, divided by [H⁻¹]_qq, moves all remaining columns along row q of H⁻¹.
        error = (weight[:, q] - values) / inverse[q, q]
        weight[:, q + 1 :] -= torch.outer(error, inverse[q, q + 1 :])
        # Equation 3: remove q from H⁻¹. What is left is the inverse over the remaining columns.
        inverse -= torch.outer(inverse[:, q], inverse[q, :]) / inverse[q, q]

    joined = AffineParams(torch.stack(scales, 1).float(), torch.stack(zeros, 1).float())
    return QuantizedWeight(grid, codes, joined, column_group)


def refine(weight: Tensor, start: QuantizedWeight, hessian: Tensor, cycles: int) -> QuantizedWeight:
    """Cyclic coordinate descent on `tr((W - Ŵ) H (W - Ŵ)ᵀ)`, everything recomputed at every step.

    Along column j the loss is least at `ŵ_j + r_j / H_jj` with `r = (W - Ŵ) H`; after the columns of a
    group, its scales take the factor that minimizes the loss along the group's own values.
    """
    grid, size = start.grid, start.grid.group_size
    weight, hessian = weight.double(), hessian.double()
    codes, scale, zero = start.codes.clone(), start.params.scale.clone(), start.params.zero
    values = start.values().double()
    for _ in range(cycles):
        for k, low in enumerate(range(0, weight.shape[1], size)):
            for j in range(low, low + size):
                best = values[:, j] + ((weight - values) @ hessian)[:, j] / hessian[j, j]
                steps, values[:, j] = grid.round_column(best, AffineParams(scale[:, k], zero[:, k]), j - low)
                codes[:, j] = steps.to(torch.uint8)
            part = torch.zeros_like(values)
            part[:, low : low + size] = values[:, low : low + size]
            along = ((weight - values) @ hessian * part).sum(1)
            scale[:, k] = (scale[:, k] * (1 + along / (part @ hessian * part).sum(1))).half().float()
            group = slice(low, low + size)
            values[:, group] = (codes[:, group].double() - zero[:, k, None]) * scale[:, k, None]
    return QuantizedWeight(grid, codes, AffineParams(scale, zero), start.column_group)
