"""GPTQ as its paper writes it down, slowly, in float64: arXiv:2210.17323, equations 2 and 3.

The inverse Hessian is explicit, every column's error updates all remaining columns at once, and a
finished column is eliminated from the inverse by one Gaussian step: no Cholesky factor, no blocks.
The grid alone is quantkit's, so a comparison tests the error feedback and nothing else.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from quantkit.grids.affine import AffineGrid, AffineParams
from quantkit.grids.grid import QuantizedWeight


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
        column_codes, values = nearest(weight[:, q], params.scale, params.zero, grid.max_code)
        codes[:, order[q]] = column_codes.to(torch.uint8)
        column_group[order[q]] = len(scales) - 1
        # Equation 2: the error, divided by [H⁻¹]_qq, moves all remaining columns along row q of H⁻¹.
        error = (weight[:, q] - values) / inverse[q, q]
        weight[:, q + 1 :] -= torch.outer(error, inverse[q, q + 1 :])
        # Equation 3: remove q from H⁻¹. What is left is the inverse over the remaining columns.
        inverse -= torch.outer(inverse[:, q], inverse[q, :]) / inverse[q, q]

    joined = AffineParams(torch.stack(scales, 1).float(), torch.stack(zeros, 1).float())
    return QuantizedWeight(grid, codes, joined, column_group)


def nearest(column: Tensor, scale: Tensor, zero: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Codes and values of a column on the affine grid."""
    codes = (torch.round(column / scale) + zero).clamp(0, max_code)
    return codes, (codes - zero) * scale


def refine(
    weight: Tensor, start: QuantizedWeight, hessian: Tensor, cycles: int, run: int = 32, alone: bool = False
) -> tuple[QuantizedWeight, list[Tensor]]:
    """Cyclic coordinate descent on `tr((W - Ŵ) H (W - Ŵ)ᵀ)`, everything recomputed at every step.

    Along column j the loss is least at `ŵ_j + r_j / H_jj` with `r = (W - Ŵ) H`. Groups k and k + n/2 take
    turns run by run of columns, each from what was before the run; a row takes both moves, or, where that
    loses more, only the better one. `alone`: groups take turns one by one. After the columns of a pair its
    scales take the factors that minimize the loss along each group's own values. A row that lost by all of
    that stays as it was. Also the loss of every row after each visit.
    """
    grid, size = start.grid, start.grid.group_size
    weight, hessian = weight.double(), hessian.double()
    codes, scale, zero = start.codes.double(), start.params.scale.double(), start.params.zero
    count = weight.shape[1] // size
    pairs = count if alone else (count + 1) // 2

    def decoded(codes, scale):
        return (codes - zero.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)

    def loss(codes, scale):
        delta = weight - decoded(codes, scale)
        return (delta @ hessian * delta).sum(1)

    def descended(codes, group, columns):
        codes = codes.clone()
        for j in columns:
            values = decoded(codes, scale)
            best = values[:, j] + ((weight - values) @ hessian)[:, j] / hessian[j, j]
            codes[:, j] = nearest(best, scale[:, group], zero[:, group], grid.max_code)[0]
        return codes

    losses = [loss(codes, scale)]
    for _, k in product(range(cycles), range(pairs)):
        groups, before = range(k, count, pairs), codes
        for low in range(0, size, run):
            moves = [
                descended(codes, group, range(group * size + low, group * size + min(low + run, size)))
                for group in groups
            ]
            if len(moves) == 2:  # their codes differ from the old ones in different columns
                moves.append(moves[0] + moves[1] - codes)
            best = torch.stack([loss(move, scale) for move in moves]).argmin(0)
            codes = torch.stack(moves)[best, torch.arange(len(codes))]
        values, after = decoded(codes, scale), scale.clone()
        for group in groups:
            part = torch.zeros_like(values)
            part[:, group * size : (group + 1) * size] = values[:, group * size : (group + 1) * size]
            along = ((weight - values) @ hessian * part).sum(1)
            after[:, group] *= 1 + along / (part @ hessian * part).sum(1)
        after = after.half().double()
        keep = (loss(codes, after) <= losses[-1])[:, None]
        codes, scale = torch.where(keep, codes, before), torch.where(keep, after, scale)
        losses.append(loss(codes, scale))
    params = AffineParams(scale.float(), zero)
    return QuantizedWeight(grid, codes.to(torch.uint8), params, start.column_group), losses


def vector_sweep(weight: Tensor, hessian: Tensor, steps: Tensor, nearest: Callable) -> Tensor:
    """Values `[out, in]` where eight columns are chosen together, given each column's `steps [out, in]`.

    As above with a block for a column (Optimal Brain Compression, arXiv:2208.11580, equation 5): a vector's
    error e costs `e ([H⁻¹]_vv)⁻¹ eᵀ`, and moves all remaining columns by `-e ([H⁻¹]_vv)⁻¹ [H⁻¹]_v:`.
    `nearest(metric, y)` chooses levels `[8, out]` near `y [8, out]`.
    """
    weight, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    values = torch.zeros_like(weight)
    for low in range(0, weight.shape[1], 8):
        v = slice(low, low + 8)
        metric = torch.linalg.inv(inverse[v, v])
        step = steps[:, low].double()
        levels = nearest(metric.float(), (weight[:, v] / step[:, None]).t().float())
        values[:, v] = levels.double().t() * step[:, None]
        error = (weight[:, v] - values[:, v]) @ metric
        weight[:, low + 8 :] -= error @ inverse[v, low + 8 :]
        inverse = inverse - inverse[:, v] @ metric @ inverse[v, :]
    return values.float()
