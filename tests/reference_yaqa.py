"""Two-sided error feedback to the letter, slowly, in float64: the loss is one dense matrix, `G ⊗ H`.

Weights are quantized one after another, row by row. Each goes where the errors of those before it want it,
all weights to come being free to make up for the rest: the conditional optimum of the quadratic form, solved
for anew every time (Babai's nearest plane; arXiv:2505.22988, section 3.2, arXiv:2507.18553 for GPTQ). The
grid alone is quantkit's, so a comparison tests the feedback and nothing else.
"""

import torch
from reference_gptq import order_of, pivots
from torch import Tensor

from quantkit.grids.affine import AffineGrid


def damped(matrix: Tensor, share: float) -> Tensor:
    matrix = matrix.double()
    return matrix + share * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)


def orders(hessian: Tensor, curvature: Tensor, group_size: int) -> tuple[list[int], list[int]]:
    """Rows and columns in the order they are quantized."""
    rows = sorted(range(len(curvature)), key=lambda row: -curvature[row, row].item())
    return rows, order_of(hessian.diagonal().tolist(), group_size, "group")


def free(loss: Tensor, errors: Tensor, known: int) -> Tensor:
    """Errors of least loss, where the first `known` ones are given."""
    found = errors.clone()
    if known < len(errors):
        found[known:] = -torch.linalg.solve(loss[known:, known:], loss[known:, :known] @ errors[:known])
    return found


def feedback(
    weight: Tensor, grid: AffineGrid, hessian: Tensor, curvature: Tensor, block: int = 1
) -> tuple[Tensor, Tensor]:
    """Values `[out, in]` and scales `[out, groups]`, rows and columns of all in the order of quantizing; the
    rows of a block know nothing of each other. hessian, curvature: damped, in this order."""
    out, width = weight.shape
    weight, loss = weight.double(), torch.kron(curvature, hessian)
    importance = pivots(torch.linalg.inv(hessian)).float()
    values, scales = torch.zeros_like(weight), torch.zeros(out, width // grid.group_size)
    for start in range(0, out, block):
        above = free(loss, (weight - values).flatten(), start * width).view_as(weight)
        for row in range(start, min(start + block, out)):
            target = weight[row] - above[row]
            for j in range(width):
                wanted = target - free(hessian, target - values[row], j)
                if j % grid.group_size == 0:
                    span = slice(j, j + grid.group_size)
                    params = grid.fit(wanted[span].float()[None], importance[span])
                    scales[row, j // grid.group_size] = params.scale
                code = grid.round(wanted[j].float()[None, None], params)
                values[row, j] = grid.decode(code, params)
    return values, scales


def descend(
    weight: Tensor, grid: AffineGrid, hessian: Tensor, curvature: Tensor, values: Tensor, scales: Tensor
) -> None:
    """One cycle of coordinate descent, in place: codes of a group, then its scale."""
    half = 2 ** (grid.bits - 1)
    for row in range(len(weight)):
        for k in range(scales.shape[1]):
            group = range(k * grid.group_size, (k + 1) * grid.group_size)
            scale = scales[row, k].double()
            for j in group:
                slope = (curvature @ (weight - values) @ hessian)[row, j]
                wanted = values[row, j] + slope / (curvature[row, row] * hessian[j, j])
                values[row, j] = scale * (wanted / scale).round().clamp(-half, half - 1)
            slope = (curvature @ (weight - values) @ hessian)[row, group]
            own = values[row, group]
            power = curvature[row, row] * own @ hessian[group][:, group] @ own
            better = (scale * (1 + slope @ own / power)).half().double()
            change = own * (better / scale - 1)
            power = curvature[row, row] * change @ hessian[group][:, group] @ change
            if power < 2 * slope @ change:
                values[row, group] += change
                scales[row, k] = better.float()
