"""Refinement: coordinate descent on codes and scales, starting from what GPTQ found.

GPTQ fixes each column once, before it knows what the later columns will become. With all columns
chosen, any one of them can be chosen again: for `r = H (W - Ŵ)ᵀ` the loss `tr(dW H dWᵀ)` along
column j is least at `ŵ_j + r_j / H_jj`, so the nearest grid value to that never raises it (cyclic
coordinate descent, as in QuantEase, Behdin et al. 2023, arXiv:2309.01885, section 3). Likewise, a
group's values `V` have a best common factor, `1 + <r, V> / <V, H V>`, which the scale takes up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.grids import Grid

RUN = 32  # columns between two updates of a group's residual


def refine(
    target: Tensor, codes: Tensor, params: list, grid: Grid, hessian: Tensor, cycles: int
) -> tuple[Tensor, list]:
    """Better codes and parameters for `target [out, in]`, with the same grid and bytes.

    codes: uint8 `[out, in]`. params: one entry a group, in column order. hessian: `[in, in]`,
    damped, in the same column order. Every group is visited `cycles` times.
    """
    size = grid.group_size
    params = list(params)
    chosen = codes.t().contiguous()  # [in, out], as everything below
    wanted = target.t().contiguous()
    delta = torch.empty_like(wanted)  # W - Ŵ
    for k, part in enumerate(params):
        group = slice(k * size, (k + 1) * size)
        torch.sub(wanted[group], grid.decode(codes[:, group], part).t(), out=delta[group])
    for _ in range(cycles):
        for k in range(len(params)):
            group = slice(k * size, (k + 1) * size)
            own = hessian[group, group]
            values = wanted[group] - delta[group]
            residual = hessian[group] @ delta
            _descend(chosen[group], values, residual, params[k], grid, own)
            params[k] = _rescale(chosen[group], values, residual, params[k], grid, own)
            torch.sub(wanted[group], values, out=delta[group])
    return chosen.t().contiguous(), params


def _descend(codes: Tensor, values: Tensor, residual: Tensor, params, grid: Grid, hessian: Tensor) -> None:
    """Choose every column of one group again, in place; all `[group_size, out]`, hessian the group's own."""
    for low in range(0, len(codes), RUN):
        high = min(low + RUN, len(codes))
        run = slice(low, high)
        own = hessian[run, run]
        moved = torch.empty_like(values[run])
        before = moved.t()
        columns = values[run].unbind(), residual[run].unbind(), moved.unbind(), own.diagonal().unbind()
        chosen = []
        for k, (value, wish, move, curvature) in enumerate(zip(*columns, strict=True)):
            if k:
                wish.addmv_(before[:, :k], own[:k, k], alpha=-1)
            chosen.append(grid.round_column(torch.addcdiv(value, wish, curvature), params, low + k))
            torch.sub(chosen[-1][1], value, out=move)
        column_codes, new_values = zip(*chosen, strict=True)
        torch.stack(new_values, out=values[run])
        codes[run] = torch.stack(column_codes)
        residual[high:].addmm_(hessian[high:, low:high], moved, alpha=-1)
        # in its run a column has seen the moves before it only: give it the others, its own included
        residual[low:high].addmm_(hessian[low:high, low:high].triu(), moved, alpha=-1)
        residual[:low].addmm_(hessian[:low, low:high], moved, alpha=-1)


def _rescale(codes: Tensor, values: Tensor, residual: Tensor, params, grid: Grid, hessian: Tensor):
    """The group's parameters with the best common factor on its values, which change in place."""
    power = (values * (hessian @ values)).sum(0)
    factor = 1 + (residual * values).sum(0) / power.clamp(min=torch.finfo(power.dtype).tiny)
    scaled = grid.scaled(params, torch.where((power > 0) & (factor > 0), factor, 1.0))
    values.copy_(grid.decode(codes.t(), scaled).t())
    return scaled
