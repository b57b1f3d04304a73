"""Divergence of all candidates of a unit, from one measured candidate.

A unit's divergence is nearly proportional to the squared error of its outputs on calibration text, `tr(dW H
dWᵀ)`, for every grid: on the bundled model the factor varies by a tenth between 2 and 6 bits, but 250-fold
between units. So one candidate is measured. The error of other candidates is that of rounding to nearest,
times the solver's gain on the candidate with the most similar error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quantkit.auto.units import Unit, measured, usual

TINY = 1e-30


@dataclass
class Errors:
    """Relative errors of one unit: {candidate: `Σ tr(dW H dWᵀ)` over linears and tokens / `Σ tr(W H Wᵀ)`}.
    nearest: for rounding to nearest, all candidates. solved: for the job's solver, usual and measured
    candidates."""

    nearest: dict[str, float] = field(default_factory=dict)
    solved: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """A KL divergence at the model's output: mean over tokens and standard error, in nats."""

    mean: float
    stderr: float


def losses(unit: Unit, errors: Errors, divergence: Divergence) -> dict[str, float]:
    """Return {candidate: divergence that it adds to the original unit's} for all candidates of a unit.

    divergence: of the measured candidate from the usual one, whose rounding errors are independent, so that
    their squares add up; outside the blocks from the original unit.
    """
    replaced = 0.0 if unit.block is None else errors.solved[usual(unit).name]
    slope = divergence.mean / max(errors.solved[measured(unit).name] + replaced, TINY)
    names = (candidate.name for candidate in unit.candidates)
    return {name: slope * (errors.solved.get(name) or _corrected(name, errors)) for name in names}


def _corrected(name: str, errors: Errors) -> float:
    """Return a candidate's error of rounding to nearest, times the solver's gain on a similar candidate."""
    nearest = max(errors.nearest[name], TINY)
    like = min(errors.solved, key=lambda other: abs(math.log(max(errors.nearest[other], TINY) / nearest)))
    return nearest * errors.solved[like] / max(errors.nearest[like], TINY)
