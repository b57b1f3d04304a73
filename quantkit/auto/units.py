"""The terms of a search: a unit is stored as one of its candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.layouts import LinearSpec

ANCHORS = 3  # measured candidates of a unit
STEP = 0.9  # bits per weight between measured candidates


@dataclass(frozen=True)
class Candidate:
    """One way to store a unit. name: as in recipes, `3,128` or `Q3_K`; nbytes: size of the unit."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """Linears that an engine stores in the same way, such as q, k and v, or all experts of a layer.

    name: as in results. block: index of its block; None for a matrix outside the blocks. rows: its linears;
    empty outside the blocks. weights: number of weights; candidates: from the smallest to the largest.
    """

    name: str
    block: int | None
    rows: tuple[LinearSpec, ...]
    weights: int
    candidates: tuple[Candidate, ...]

    def candidate(self, name: str) -> Candidate:
        """Return the candidate of that name."""
        return next(one for one in self.candidates if one.name == name)

    def bits(self, candidate: Candidate) -> float:
        """Return bits per weight."""
        return 8 * candidate.nbytes / self.weights


Choice = Mapping[str, str]  # unit -> candidate, by their names


@dataclass(frozen=True)
class Preset:
    """A choice that quantkit makes without a search. values: its recipe, by dotted keys."""

    name: str
    choice: Choice
    values: Mapping[str, Any]


def nbytes(units: Sequence[Unit], choice: Choice) -> int:
    """Return the bytes of all units."""
    return sum(unit.candidate(choice[unit.name]).nbytes for unit in units)


def bits_per_weight(units: Sequence[Unit], choice: Choice) -> float:
    """Return bits per weight over all units."""
    return 8 * nbytes(units, choice) / sum(unit.weights for unit in units)


def anchors(unit: Unit) -> tuple[Candidate, ...]:
    """Return up to ANCHORS candidates of a unit to measure: the smallest, then each STEP bits larger or more.
    The others follow from the errors of all candidates (`curve.py`)."""
    found: list[Candidate] = []
    for one in unit.candidates:
        if len(found) < ANCHORS and (not found or unit.bits(one) >= unit.bits(found[-1]) + STEP):
            found.append(one)
    return tuple(found)


def usual(unit: Unit) -> Candidate:
    """Return the candidate that stores a unit while others are replaced: the middle anchor."""
    found = anchors(unit)
    return found[(len(found) - 1) // 2]
