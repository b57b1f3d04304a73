"""What is chosen, and among what: a unit is stored one way, a candidate is such a way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.layouts import LinearSpec

ANCHORS = 3  # candidates of a unit whose divergence is known
STEP = 0.9  # bits per weight between candidates that are measured


@dataclass(frozen=True)
class Candidate:
    """One way to store a unit. name: as recipes spell it, `3,128` or `Q3_K`; nbytes: what the unit takes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """Linears that an engine stores alike, such as q, k and v, or all experts of a layer.

    name: what results call it. block: index of its block; None for a matrix outside the blocks. rows: its
    linears; empty outside the blocks. weights: how many; candidates: from the smallest to the largest.
    """

    name: str
    block: int | None
    rows: tuple[LinearSpec, ...]
    weights: int
    candidates: tuple[Candidate, ...]

    def candidate(self, name: str) -> Candidate:
        """The candidate of that name."""
        return next(one for one in self.candidates if one.name == name)

    def bits(self, candidate: Candidate) -> float:
        """Bits per weight."""
        return 8 * candidate.nbytes / self.weights


Choice = Mapping[str, str]  # unit -> candidate, by their names


@dataclass(frozen=True)
class Preset:
    """What quantkit makes without a search. values: its recipe, by dotted keys."""

    name: str
    choice: Choice
    values: Mapping[str, Any]


def nbytes(units: Sequence[Unit], choice: Choice) -> int:
    """Bytes of all units."""
    return sum(unit.candidate(choice[unit.name]).nbytes for unit in units)


def bits_per_weight(units: Sequence[Unit], choice: Choice) -> float:
    """Of all units together."""
    return 8 * nbytes(units, choice) / sum(unit.weights for unit in units)


def anchors(unit: Unit) -> tuple[Candidate, ...]:
    """Up to ANCHORS of a unit's candidates that are measured: the smallest, then each that is at least `STEP`
    bits larger. What lies between and above follows from the errors of all (`curve.py`)."""
    found: list[Candidate] = []
    for one in unit.candidates:
        if len(found) < ANCHORS and (not found or unit.bits(one) >= unit.bits(found[-1]) + STEP):
            found.append(one)
    return tuple(found)


def usual(unit: Unit) -> Candidate:
    """As which a unit is stored while others are replaced: the anchor in the middle."""
    found = anchors(unit)
    return found[(len(found) - 1) // 2]
