"""The terms of a search: units, and the candidates in which a unit can be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.layouts import LinearSpec

USUAL_BITS = 0.9  # least bits per weight of the usual candidate above the smallest


@dataclass(frozen=True)
class Candidate:
    """A format for a unit. name: as in recipes, `3,128` (bits, group size) or `Q3_K`. nbytes: unit's size."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """Linears that an engine stores in the same way, such as q, k and v, or all experts of a layer.

    block: index of the block; None for a matrix outside the blocks. rows: the linears; empty outside the
    blocks. weights: number of weights. candidates: from the smallest to the largest.
    """

    name: str
    block: int | None
    rows: tuple[LinearSpec, ...]
    weights: int
    candidates: tuple[Candidate, ...]

    def candidate(self, name: str) -> Candidate:
        """Return the candidate with this name."""
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def bits(self, candidate: Candidate) -> float:
        """Return a candidate's bits per weight."""
        return 8 * candidate.nbytes / self.weights


Choice = Mapping[str, str]  # unit -> candidate, by their names


@dataclass(frozen=True)
class Preset:
    """A choice that needs no search. choice: {unit: candidate}. values: recipe by dotted keys."""

    name: str
    choice: Choice
    values: Mapping[str, Any]


def nbytes(units: Sequence[Unit], choice: Choice) -> int:
    """Return the bytes of all units in the chosen candidates."""
    return sum(unit.candidate(choice[unit.name]).nbytes for unit in units)


def bits_per_weight(units: Sequence[Unit], choice: Choice) -> float:
    """Return the mean bits per weight over all units in the chosen candidates."""
    return 8 * nbytes(units, choice) / sum(unit.weights for unit in units)


def usual(unit: Unit) -> Candidate:
    """Return the candidate in which a unit is stored while others are measured: about 3 bits per weight."""
    smallest = unit.candidates[0]
    larger = (other for other in unit.candidates if unit.bits(other) >= unit.bits(smallest) + USUAL_BITS)
    return next(larger, smallest)


def measured(unit: Unit) -> Candidate:
    """Return the candidate to measure: the smallest, outside the blocks the usual one. `curve.py` estimates
    the divergences of the others."""
    return usual(unit) if unit.block is None else unit.candidates[0]
