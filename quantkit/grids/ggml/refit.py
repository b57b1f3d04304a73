"""A sub-block's integers chosen anew for columns that error feedback moved; the block's d and dmin stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.grids.ggml.block import BlockGrid, SubScales, SubScalesAndMins, divisor

SPAN = 1  # neighbours of the scale on either side that are tried
SCALES = {
    "Q2_K": (0, 15),
    "Q3_K": (-32, 31),
    "Q4_K": (0, 63),
    "Q5_K": (0, 63),
    "Q6_K": (-128, 127),
    "IQ4_XS": (-32, 31),
}


def refit(grid: BlockGrid, weight: Tensor, params: Any, k: int, importance: Tensor) -> Any:
    """`params` of blocks `[rows]` with the integers of sub-block k chosen for `weight [rows, sub_size]`.

    Of the present scale and its neighbours the one with the least squared error, by importance
    `[sub_size]`; with each goes the min that suits its codes.
    """
    if not isinstance(params, (SubScales, SubScalesAndMins)):
        return params
    lowest, highest = SCALES[grid.name]
    candidates = [(params.scales[:, k] + change).clamp_(lowest, highest) for change in range(-SPAN, SPAN + 1)]
    fit = _with_min if isinstance(params, SubScalesAndMins) else _without_min
    errors, fitted = zip(
        *(fit(grid, weight, params, scale, k, importance) for scale in candidates), strict=True
    )
    best = torch.stack(errors).argmin(0)
    fields = {}
    for name in fitted[0]:
        values = getattr(params, name).clone()
        values[:, k] = torch.stack([found[name] for found in fitted]).gather(0, best[None])[0]
        fields[name] = values
    return replace(params, **fields)


def _without_min(
    grid: BlockGrid, weight: Tensor, params: SubScales, scale: Tensor, k: int, importance: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    step = (params.d * scale)[:, None]
    values = grid.levels_of(weight / divisor(step)).mul_(step)
    return values.sub_(weight).square_() @ importance, {"scales": scale}


def _with_min(
    grid: BlockGrid, weight: Tensor, params: SubScalesAndMins, scale: Tensor, k: int, importance: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes for the present min, the min for those codes, and what both together lose."""
    step = (params.d * scale)[:, None]
    low = params.dmin * params.mins[:, k]
    above = grid.levels_of((weight + low[:, None]) / divisor(step)).mul_(step).sub_(weight)
    wanted = (above @ importance) / importance.sum() / divisor(params.dmin)
    mins = wanted.round_().clamp_(0, SCALES[grid.name][1])
    low = (params.dmin * mins)[:, None]
    values = grid.levels_of((weight + low) / divisor(step)).mul_(step).sub_(low)
    return values.sub_(weight).square_() @ importance, {"scales": scale, "mins": mins}
