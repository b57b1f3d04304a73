"""Divergence of all candidates of a unit, from a few measured candidates.

A unit's divergence is nearly proportional to the squared error of its outputs on calibration text, `tr(dW H
dWᵀ)`, for every grid: on the demo model the factor differs by a tenth between 2 and 6 bits, and 250-fold
between units. So a few distant candidates are measured, and the divergence is linear in the error between
them. Errors of all others come from rounding to nearest, times the solver's gain on the measured candidate
with the nearest error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.auto.units import Unit

TINY = 1e-30
SPREAD = 0.1  # relative natural spread of the factors of a unit's candidates
LEAST = 0.01  # of a unit's overall factor: noise must not make a larger error better


@dataclass
class Errors:
    """Relative errors of one unit by candidate: `Σ tr(dW H dWᵀ)` over its linears and tokens, divided by the
    same sum for the weights. nearest: rounded to nearest; solved: by the job's solver."""

    nearest: dict[str, float] = field(default_factory=dict)
    solved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """KL divergence at the output, or its change: mean over tokens in nats, and standard error."""

    mean: float
    stderr: float


Measured = Mapping[str, Divergence]  # by candidate


def losses(unit: Unit, errors: Errors, measured: Measured, usual: str | None) -> dict[str, float]:
    """Return {candidate: added divergence} of a unit.

    measured: changes from the `usual` candidate, or from the original unit if `usual` is None.
    """
    pieces = _pieces(errors, measured, usual)
    found = {}
    for candidate in unit.candidates:
        name = candidate.name
        found[name] = _below(pieces, errors.solved.get(name) or _corrected(name, errors))
    return found


def _corrected(name: str, errors: Errors) -> float:
    """Return the error of rounding, times the solver's gain on the candidate with the nearest error."""
    nearest = max(errors.nearest[name], TINY)
    like = min(errors.solved, key=lambda other: abs(math.log(max(errors.nearest[other], TINY) / nearest)))
    return nearest * errors.solved[like] / max(errors.nearest[like], TINY)


def _pieces(errors: Errors, measured: Measured, usual: str | None) -> list[tuple[float, float]]:
    """Return [(largest error, divergence per error)]. Uncertain factors lean towards the unit's others
    (Gaussian posterior means, with SPREAD as the prior's deviation)."""
    points = [(errors.solved[name], one.mean, one.stderr) for name, one in measured.items()]
    points.append((errors.solved[usual] if usual else 0.0, 0.0, 0.0))
    points.sort()
    rows = []
    for (left, low, a), (right, high, b) in zip(points, points[1:], strict=False):
        width = max(right - left, TINY)
        rows.append((right, (high - low) / width, math.hypot(a, b) / width))
    if not rows:
        return [(math.inf, 0.0)]
    whole = max((points[-1][1] - points[0][1]) / max(points[-1][0] - points[0][0], TINY), TINY)
    prior = (SPREAD * whole) ** 2
    weights = [1 / max(noise**2 + prior, TINY**2) for *_, noise in rows]
    centre = sum(w * factor for w, (_, factor, _) in zip(weights, rows, strict=True)) / sum(weights)
    found = []
    for end, factor, noise in rows:
        share = noise**2 / max(noise**2 + prior, TINY**2)
        found.append((end, max(factor + share * (centre - factor), LEAST * whole)))
    return [*found[:-1], (math.inf, found[-1][1])]


def _below(pieces: Sequence[tuple[float, float]], error: float) -> float:
    """Return the divergence of an error: the integral of the factor from 0."""
    total, start = 0.0, 0.0
    for end, factor in pieces:
        total += factor * max(0.0, min(end, error) - start)
        start = end
    return total
