"""Compare error feedback with round to nearest, linear by linear."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers import Solved, clipping, measured, row_losses, rtn

CANCELLED = 0.02  # least share of the undamped loss in the damped loss: below, digits cancel


@dataclass(frozen=True)
class Attempt:
    """The result of error feedback for the stacked linears of a site, or of several sites.

    weights: of each site. lost: of every row, `e H eᵀ` with the damped H, and the damping's part of it,
    `[2, sites, out]`. note: how damping had to grow, if it had to. clipped: scales are at their type's limit.
    """

    weights: list[QuantizedWeight]
    lost: Tensor
    note: str | None
    clipped: bool


def better(attempt: Attempt, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> list[Solved]:
    """Return, for each site, the better of the attempt and round to nearest for one linear.

    weight: `[(sites,) out, in]`, which is `rows` of the attempt. hessian: `[(sites,) in, in]`. Losses are
    compared on an even sample of rows.
    """
    sampled = _sampled(weight, grid)
    losses = [*_losses(weight, grid, hessian), *attempt.lost[..., rows][..., sampled].sum(-1)]
    weights, hessians = (stacked.view(-1, *stacked.shape[-2:]) for stacked in (weight, hessian))
    solved = []
    for k, (total, rtn_loss, damped, damping) in enumerate(torch.stack(losses, 1).tolist()):
        weight, hessian, scale = weights[k], hessians[k], max(total, 1e-30)
        error, rtn_error = (damped - damping) / scale, rtn_loss / scale
        chosen = attempt.weights[k]
        chosen = replace(chosen, codes=chosen.codes[rows], params=rows_of(chosen.params, rows))
        if not damped - damping > CANCELLED * damped:  # too little is left of their digits
            error = row_losses(chosen.values()[sampled] - weight[sampled], hessian).sum().item() / scale
        notes = (attempt.note,) if attempt.note else ()
        if error <= rtn_error:  # not a number loses, too
            notes += clipping(chosen) if attempt.clipped else ()
            solved.append(Solved(chosen, error, rtn_error, notes=notes))
        else:
            reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
            solved.append(_rounded(weight, grid, hessian, rtn_error, reason, notes))
    return solved


def nearest(weight: Tensor, grid: Grid, hessian: Tensor, reason: str) -> Solved:
    """Return a linear `[out, in]` rounded to nearest. reason: why there is no error feedback."""
    total, rtn_loss = (loss.item() for loss in _losses(weight, grid, hessian))
    return _rounded(weight, grid, hessian, rtn_loss / max(total, 1e-30), reason)


def _rounded(
    weight: Tensor, grid: Grid, hessian: Tensor, error: float, reason: str, notes: tuple[str, ...] = ()
) -> Solved:
    rounded = rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian))
    return Solved(rounded, error, error, fallback=reason, notes=notes + clipping(rounded))


def _losses(weight: Tensor, grid: Grid, hessian: Tensor) -> list[Tensor]:
    """Return `tr(W H Wᵀ)` and the loss of round to nearest, `[sites]` each, on a sample of the rows."""
    sample = weight[..., _sampled(weight, grid), :]
    flat = sample.flatten(0, -2)
    missed = rtn.missed(flat, grid, rtn.fitted(flat, grid, hessian)).view(sample.shape)
    return [row_losses(delta, hessian).sum(-1).view(-1) for delta in (sample, missed)]


def _sampled(weight: Tensor, grid: Grid) -> slice:
    """Return the rows on which losses are compared."""
    return slice(None) if grid.spans_matrix else measured(weight.shape[-2])
