"""Divergence of all candidates of a unit, from a few measured candidates.

A unit's divergence is nearly proportional to the squared error of its outputs on calibration text, `tr(dW H
dWᵀ)`, for every grid: on the bundled model the factor varies by a tenth between 2 and 6 bits, but 250-fold
between units. So only a few candidates are measured, and the divergence is interpolated linearly in the
error. The error of other candidates is that of rounding to nearest, times the solver's gain on the measured
candidate with the most similar error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.auto.units import Unit

TINY = 1e-30
SPREAD = 0.1  # relative spread of the slopes of a unit's candidates
LEAST = 0.01  # share of the mean slope: noise must not make a larger error look better


@dataclass
class Errors:
    """Relative errors of one unit: {candidate: `Σ tr(dW H dWᵀ)` over linears and tokens / `Σ tr(W H Wᵀ)`}.
    nearest: for rounding to nearest, all candidates. solved: for the job's solver, measured candidates."""

    nearest: dict[str, float] = field(default_factory=dict)
    solved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """A KL divergence at the model's output, or a change of it: mean over tokens and standard error, nats."""

    mean: float
    stderr: float


Measured = Mapping[str, Divergence]  # by candidate


def losses(unit: Unit, errors: Errors, measured: Measured, usual: str | None) -> dict[str, float]:
    """Return {candidate: divergence that it adds to the original unit's} for all candidates of a unit.

    measured: changes from the `usual` candidate, or from the original unit if `usual` is None.
    """
    pieces = _pieces(errors, measured, usual)
    names = (candidate.name for candidate in unit.candidates)
    return {name: _integral(pieces, errors.solved.get(name) or _corrected(name, errors)) for name in names}


def _corrected(name: str, errors: Errors) -> float:
    """Return a candidate's error of rounding to nearest, times the solver's gain on a similar candidate."""
    nearest = max(errors.nearest[name], TINY)
    like = min(errors.solved, key=lambda other: abs(math.log(max(errors.nearest[other], TINY) / nearest)))
    return nearest * errors.solved[like] / max(errors.nearest[like], TINY)


def _pieces(errors: Errors, measured: Measured, usual: str | None) -> list[tuple[float, float]]:
    """Return the pieces of the curve, [(largest error, divergence per error)]. Uncertain slopes are moved
    towards the unit's mean slope (Gaussian posterior means; SPREAD is the prior's deviation)."""
    points = [(errors.solved[name], change.mean, change.stderr) for name, change in measured.items()]
    points.append((errors.solved[usual] if usual else 0.0, 0.0, 0.0))
    points.sort()
    slopes = []
    for (left, low, a), (right, high, b) in zip(points, points[1:], strict=False):
        width = max(right - left, TINY)
        slopes.append((right, (high - low) / width, math.hypot(a, b) / width))
    if not slopes:
        return [(math.inf, 0.0)]
    whole = max((points[-1][1] - points[0][1]) / max(points[-1][0] - points[0][0], TINY), TINY)
    prior = (SPREAD * whole) ** 2
    weights = [1 / max(noise**2 + prior, TINY**2) for *_, noise in slopes]
    centre = sum(w * factor for w, (_, factor, _) in zip(weights, slopes, strict=True)) / sum(weights)
    pieces = []
    for end, factor, noise in slopes:
        share = noise**2 / max(noise**2 + prior, TINY**2)
        pieces.append((end, max(factor + share * (centre - factor), LEAST * whole)))
    return [*pieces[:-1], (math.inf, pieces[-1][1])]


def _integral(pieces: Sequence[tuple[float, float]], error: float) -> float:
    """Return the curve's divergence at an error: the integral of the slope from 0."""
    total, start = 0.0, 0.0
    for end, factor in pieces:
        total += factor * max(0.0, min(end, error) - start)
        start = end
    return total
