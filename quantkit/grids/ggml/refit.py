"""A sub-block's integers chosen anew for columns that error feedback moved; the block's d and dmin stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.ggml.params import SubScalesAndMins
from quantkit.grids.grid import Grid

SPAN = 1  # neighbours of the scale on either side that are tried


def refit(grid: Grid, weight: Tensor, params: Any, k: int, importance: Tensor) -> Any:
    """`params` of blocks `[rows]` with the integers of sub-block k chosen for `weight [sub_size, rows]`.

    Of the present scale and its neighbours the one with the least squared error, by importance
    `[sub_size]`; with each goes the min that suits its codes. All are tried in the same passes.
    """
    lowest, highest = grid.scale_range
    present = params.scales[:, k]
    scales = torch.stack([present + change for change in range(-SPAN, SPAN + 1)]).clamp_(lowest, highest)
    fitted = {"scales": scales}
    steps = (params.d * scales)[:, None]  # [candidates, 1, rows]
    low = steps.new_zeros(1)
    if isinstance(params, SubScalesAndMins):  # codes for the present min, then the min for those codes
        low = params.dmin * params.mins[:, k]
        above = importance @ _errors(grid, weight, steps, low) / importance.sum() + low
        unit = torch.where(params.dmin == 0, torch.inf, params.dmin)
        fitted["mins"] = (above / unit).round_().clamp_(0, highest)
        low = (params.dmin * fitted["mins"])[:, None]
    best = (importance @ _errors(grid, weight, steps, low).square_()).argmin(0, keepdim=True)
    fields = {}
    for name, found in fitted.items():
        fields[name] = getattr(params, name).clone()
        fields[name][:, k] = found.gather(0, best)[0]
    return replace(params, **fields)


def _errors(grid: Grid, weight: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """What the nearest values lie above `weight`, `[candidates, sub_size, rows]`."""
    unit, bottom = grid.in_levels(step, low)
    level = (weight + bottom).div(unit)
    grid.snap(level, level)
    return level.mul_(unit).sub_(bottom).sub_(weight)
