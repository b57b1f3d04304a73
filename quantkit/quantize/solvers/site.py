"""The linears of a site in one solve, and each of them no worse than rounded to nearest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.grids.grid import rows as rows_of
from quantkit.quantize.solvers import Solved, clipping, rtn
from quantkit.quantize.solvers.loss import row_losses

CANCELLED = 0.02  # share of a damped loss that has to be left without the damping for it to be told from both


@dataclass(frozen=True)
class Attempt:
    """weight: None where the Hessian could not be factored, as the note says. lost: of every row, `e H eᵀ`
    with the damped H, and the part of it that is the damping's, `[2, out]`."""

    weight: QuantizedWeight | None
    lost: Tensor | None
    note: str | None


def solve(
    quantize: Callable[[list[Tensor], Grid, Tensor], Attempt],
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    hessian: Tensor,
) -> list[Solved]:
    """Linears `weights [out_k, in]` that share a grid go through one `quantize(weights, grid, hessian)`."""
    results: dict[int, Solved] = {}
    for grid in dict.fromkeys(grids):
        members = [k for k, other in enumerate(grids) if other == grid]
        attempt = quantize([weights[k] for k in members], grid, hessian)
        starts = torch.tensor([0] + [len(weights[k]) for k in members]).cumsum(0).tolist()
        for k, start, end in zip(members, starts, starts[1:], strict=False):
            results[k] = _better(attempt, weights[k], slice(start, end), grid, hessian)
    return [results[k] for k in range(len(weights))]


def _better(attempt: Attempt, weight: Tensor, rows: slice, grid: Grid, hessian: Tensor) -> Solved:
    """The attempt's rows of one linear, or round to nearest where that loses less on the same inputs."""
    params = rtn.fitted(weight, grid, hessian)
    sums = [row_losses(weight, hessian).sum(), row_losses(rtn.missed(weight, grid, params), hessian).sum()]
    if attempt.weight is not None:
        sums += attempt.lost[:, rows].sum(1)
    full, rtn_loss, *lost = torch.stack(sums).tolist()
    scale = max(full, 1e-30)
    rtn_error, reason = rtn_loss / scale, attempt.note
    notes = ()
    if attempt.weight is not None:
        notes = (attempt.note,) if attempt.note else ()
        chosen = _rows(attempt.weight, rows)
        damped, damping = lost
        error = (damped - damping) / scale
        if not damped - damping > CANCELLED * damped:  # too little is left of their digits
            error = row_losses(chosen.values() - weight, hessian).sum().item() / scale
        if error <= rtn_error:  # not a number loses, too
            return Solved(chosen, error, rtn_error, notes=notes + clipping(chosen))
        reason = f"gptq's error {error:.3g} is above round-to-nearest's {rtn_error:.3g}"
    baseline = rtn.nearest(weight, grid, params)
    return Solved(baseline, rtn_error, rtn_error, fallback=reason, notes=notes + clipping(baseline))


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    return QuantizedWeight(weight.grid, weight.codes[rows], rows_of(weight.params, rows), weight.column_group)
