"""Solve linears by error feedback, or by round to nearest where that has a lower loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers import Solved, clipping, measured, row_losses, rtn
from quantkit.quantize.solvers.hessian import Indefinite

CANCELLED = 0.02  # least share of the undamped loss in the damped loss: below, digits cancel


@dataclass(frozen=True)
class Attempt:
    """The result of error feedback for the stacked linears of a site, or of several sites.

    weights: of each site. lost: of every row, `e H eᵀ` with the damped H, and the damping's part of it,
    `[2, sites, out]`. note: how damping had to grow, if it had to. clipped: some scales are at the limits of
    their dtype.
    """

    weights: list[QuantizedWeight]
    lost: Tensor
    note: str | None
    clipped: bool


def solve_linears(
    quantize: Callable[[Sequence[Tensor], Grid, Tensor], Attempt],
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    hessian: Tensor,
) -> list[list[Solved]]:
    """Return, for each of the linears `weights [(sites,) out_k, in]`, the results of all sites. `quantize`
    solves linears that share a grid as one matrix. hessian: `[(sites,) in, in]`.

    Raises Indefinite if one of several sites needs more damping.
    """
    solved: dict[int, list[Solved]] = {}
    for grid in dict.fromkeys(grids):
        members = [k for k, other in enumerate(grids) if other == grid]
        try:
            attempt = quantize([weights[k] for k in members], grid, hessian)
        except Indefinite as error:
            if hessian.ndim > 2:
                raise
            attempt = error.with_traceback(None)  # frees the tensors of its frames
        start = 0
        for k in members:
            rows = slice(start, start := start + weights[k].shape[-2])
            solved[k] = better(attempt, weights[k], rows, grid, hessian)
    return [solved[k] for k in range(len(weights))]


def better(
    attempt: Attempt | Indefinite, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor
) -> list[Solved]:
    """Return, for each site, the better of the attempt and round to nearest for one linear.

    weight: `[(sites,) out, in]`, which is `rows` of the attempt. hessian: `[(sites,) in, in]`. Losses are
    compared on an even sample of rows. An Indefinite attempt gives round to nearest and the reason.
    """
    sampled = slice(None) if grid.spans_matrix else measured(weight.shape[-2])
    sample = weight[..., sampled, :]
    flat = sample.flatten(0, -2)
    nearest = rtn.missed(flat, grid, rtn.fitted(flat, grid, hessian)).view(sample.shape)
    losses = [row_losses(delta, hessian).sum(-1).view(-1) for delta in (sample, nearest)]
    if isinstance(attempt, Attempt):
        losses += attempt.lost[..., rows][..., sampled].sum(-1)
    solved = []
    sites = (stacked.view(-1, *stacked.shape[-2:]) for stacked in (weight, hessian))
    for k, (weight, hessian, (full, rtn_loss, *lost)) in enumerate(
        zip(*sites, torch.stack(losses, 1).tolist(), strict=True)
    ):
        scale = max(full, 1e-30)
        rtn_error, notes = rtn_loss / scale, ()
        if isinstance(attempt, Indefinite):
            reason = str(attempt)
        else:
            notes = (attempt.note,) if attempt.note else ()
            chosen = attempt.weights[k]
            chosen = replace(chosen, codes=chosen.codes[rows], params=rows_of(chosen.params, rows))
            damped, damping = lost
            error = (damped - damping) / scale
            if not damped - damping > CANCELLED * damped:  # too little is left of their digits
                error = row_losses(chosen.values()[sampled] - weight[sampled], hessian).sum().item() / scale
            if error <= rtn_error:  # not a number loses, too
                notes += clipping(chosen) if attempt.clipped else ()
                solved.append(Solved(chosen, error, rtn_error, notes=notes))
                continue
            reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
        rounded = rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian))
        notes += clipping(rounded)
        solved.append(Solved(rounded, rtn_error, rtn_error, fallback=reason, notes=notes))
    return solved
