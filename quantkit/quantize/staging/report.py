"""The report of one quantized linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LinearReport:
    """What the manifest says of a quantized linear.

    error: of the linear's output on the calibration tokens (see Solved); without a Hessian `|dW|² / |W|²` of
    the stored values. rtn_error, fallback, notes: see Solved. facts: more entries, left out if None.
    """

    name: str
    error: float
    rtn_error: float | None = None
    fallback: str | None = None
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        facts = {key: value for key, value in self.facts.items() if value is not None}
        return {
            "name": self.name,
            "error": self.error,
            "rtn_error": self.rtn_error,
            "fallback": self.fallback,
            "notes": list(self.notes),
        } | facts
