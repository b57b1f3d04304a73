"""From the divergence of a few candidates of a unit to that of all.

A unit's divergence is nearly proportional to the squared error of its outputs on calibration text,
`tr(dW H dWᵀ)`, whatever grid caused it: on the demo model the factor moves by a tenth between 2 and 6 bits,
and by a factor of 250 between units. So candidates are measured where they are far apart, the factor is
interpolated between them, and the errors of all others come from rounding to nearest, times what the
solver gained on the measured candidate with the nearest error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantkit.capacity.budget.units import Unit

TINY = 1e-30
SPREAD = 0.1  # by how much the factors of a unit's candidates differ by nature, relative


@dataclass
class Errors:
    """Of one unit: `Σ tr(dW H dWᵀ)` over its linears and their tokens, by candidate, relative to the same of
    the weights themselves. nearest: rounded to nearest; solved: by the job's solver."""

    nearest: dict[str, float] = field(default_factory=dict)
    solved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """KL divergence at the output: mean over the tokens, in nats, and its standard error."""

    mean: float
    stderr: float


Measured = Mapping[str, Divergence]  # by candidate


def losses(unit: Unit, errors: Errors, measured: Measured) -> dict[str, float]:
    """The divergence of every candidate of a unit, by its name."""
    points = _factors(errors, measured)
    found = {}
    for candidate in unit.candidates:
        name = candidate.name
        error = errors.solved.get(name) or _corrected(name, errors)
        found[name] = error * _factor(points, max(error, TINY))
    return found


def _corrected(name: str, errors: Errors) -> float:
    """Rounding's error, times what the solver gained where rounding did about as well."""
    nearest = max(errors.nearest[name], TINY)
    like = min(errors.solved, key=lambda other: abs(math.log(max(errors.nearest[other], TINY) / nearest)))
    return nearest * errors.solved[like] / max(errors.nearest[like], TINY)


def _factors(errors: Errors, measured: Measured) -> list[tuple[float, float]]:
    """Logarithms of error and of divergence per error, by error. What is known badly leans towards the
    others (Gaussian posterior means, with SPREAD as the prior's deviation)."""
    rows = []
    for name, one in measured.items():
        error, mean = max(errors.solved[name], TINY), max(one.mean, TINY)
        rows.append((math.log(error), math.log(mean / error), (one.stderr / mean) ** 2))
    weights = [1 / (noise + SPREAD**2) for *_, noise in rows]
    centre = sum(w * factor for w, (_, factor, _) in zip(weights, rows, strict=True)) / sum(weights)
    shares = [noise / (noise + SPREAD**2) for *_, noise in rows]
    return sorted(
        (at, factor + share * (centre - factor)) for share, (at, factor, _) in zip(shares, rows, strict=True)
    )


def _factor(points: Sequence[tuple[float, float]], error: float) -> float:
    """Divergence per error at `error`, between the measured ones, geometrically; beyond them, as there."""
    at = math.log(error)
    if at <= points[0][0]:
        return math.exp(points[0][1])
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if at <= right:
            share = (at - left) / max(right - left, TINY)
            return math.exp(low + share * (high - low))
    return math.exp(points[-1][1])
