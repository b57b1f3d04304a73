"""Clipping of AWQ (Lin et al. 2023, arXiv:2306.00978, section 3.2): how far to cut off each group's range.

The published search multiplies every candidate by the calibration tokens. Its loss, the squared error of
what a group adds to the output, is quadratic in the weights' error: `dw_g H_gg dw_gᵀ`, from second moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, join, select

SHRINKS = tuple(1 - k / 20 for k in range(10))  # 1.00, 0.95 … 0.55 of a group's largest weight


def clipped_ranges(weight: Tensor, grid: Grid, hessian: Tensor) -> Any:
    """Parameters `[out, groups]` for `weight [out, in]`: per row and group, the candidate of least loss.

    The full range is a candidate, and the first wins a tie.
    """
    groups = []
    for start in range(0, weight.shape[1], grid.group_size):
        span = slice(start, start + grid.group_size)
        groups.append(_search(weight[:, span].contiguous(), grid, hessian[span, span].contiguous()))
    return join(groups)


def _search(weight: Tensor, grid: Grid, hessian: Tensor) -> Any:
    largest = weight.abs().amax(1, keepdim=True)
    best = best_loss = None
    for shrink in SHRINKS:
        bound = largest * shrink
        params = grid.fit(torch.clamp(weight, -bound, bound))
        delta = grid.nearest(weight.clone(), params).sub_(weight)
        losses = (delta @ hessian).mul_(delta).sum(1)
        if best is None:
            best, best_loss = params, losses
            continue
        better = losses < best_loss
        best, best_loss = select(better, params, best), torch.where(better, losses, best_loss)
    return best
