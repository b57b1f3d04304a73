"""Compare error feedback with round to nearest, linear by linear."""

from __future__ import annotations

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
    weights, hessians = (stacked.view(-1, *stacked.shape[-2:]) for stacked in (weight, hessian))
    solved = []
    for k, (total, rtn_loss, *lost) in enumerate(torch.stack(losses, 1).tolist()):  # one wait for the device
        weight, hessian, scale = weights[k], hessians[k], max(total, 1e-30)
        rtn_error = rtn_loss / scale
        if isinstance(attempt, Indefinite):
            notes, reason = (), str(attempt)
        else:
            chosen, notes = attempt.weights[k], (attempt.note,) if attempt.note else ()
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
