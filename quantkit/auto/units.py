"""The terms of a search: units, and the candidates in which a unit can be stored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.layouts import LinearSpec

TINY = 1e-30
USUAL_BITS = 0.9  # least bits per weight of the usual candidate above the smallest


@dataclass(frozen=True)
class Unit:
    """Linears that an engine stores in the same way, such as q, k and v, or all experts of a layer.

    block: index of the block; None for a matrix outside the blocks. specs: the linears; empty outside the
    blocks. weights: number of weights. candidates: the unit's bytes in each format, from the smallest to the
    largest, by its name in recipes: `3,128` (bits, group size) or `Q3_K`.
    """

    name: str
    block: int | None
    specs: tuple[LinearSpec, ...]
    weights: int
    candidates: Mapping[str, int]


Choice = Mapping[str, str]  # unit -> candidate, by their names


@dataclass(frozen=True)
class Preset:
    """A choice that needs no search. choice: {unit: candidate}. values: recipe by dotted keys."""

    name: str
    choice: Choice
    values: Mapping[str, Any]


def nbytes(units: Sequence[Unit], choice: Choice) -> int:
    """Return the bytes of all units in the chosen candidates."""
    return sum(unit.candidates[choice[unit.name]] for unit in units)


def bits_per_weight(units: Sequence[Unit], choice: Choice) -> float:
    """Return the mean bits per weight over all units in the chosen candidates."""
    return 8 * nbytes(units, choice) / sum(unit.weights for unit in units)


def usual(unit: Unit) -> str:
    """Return the candidate in which a unit is stored while others are measured: about 3 bits per weight."""
    smallest, *larger = unit.candidates
    least = unit.candidates[smallest] + USUAL_BITS * unit.weights / 8
    return next((name for name in larger if unit.candidates[name] >= least), smallest)


def measured(unit: Unit) -> str:
    """Return the candidate to measure: the smallest, outside the blocks the usual one."""
    return usual(unit) if unit.block is None else next(iter(unit.candidates))


# ---- divergence of all candidates of a unit, from one measured candidate
#
# A unit's divergence is nearly proportional to the squared error of its outputs on calibration text, `tr(dW H
# dWᵀ)`, for every grid. So one candidate is measured. The error of other candidates is that of rounding to
# nearest, times the solver's gain on the candidate with the most similar error.
#
# The JSON of a unit has `errors` by candidate, `Σ tr(dW H dWᵀ)` over linears and tokens / `Σ tr(W H Wᵀ)`:
# `nearest` for rounding to nearest, all candidates; `solved` for the job's solver, usual and measured
# candidates. `divergence` is the KL divergence at the model's output, mean over tokens and standard error in
# nats, of the measured candidate from the usual one, whose rounding errors are independent, so that their
# squares add up; outside the blocks from the original unit.

Row = Mapping[str, Mapping[str, Any]]


def unit_losses(unit: Unit, row: Row) -> dict[str, float]:
    """Return {candidate: divergence that it adds to the original unit's} for all candidates of a unit."""
    errors = row["errors"]
    replaced = 0.0 if unit.block is None else errors["solved"][usual(unit)]
    slope = row["divergence"]["mean"] / max(errors["solved"][measured(unit)] + replaced, TINY)
    return {
        name: slope * (errors["solved"].get(name) or _corrected(name, **errors)) for name in unit.candidates
    }


def _corrected(name: str, nearest: Mapping[str, float], solved: Mapping[str, float]) -> float:
    """Return a candidate's error of rounding to nearest, times the solver's gain on a similar candidate."""
    error = max(nearest[name], TINY)
    like = min(solved, key=lambda other: abs(math.log(max(nearest[other], TINY) / error)))
    return error * solved[like] / max(nearest[like], TINY)
