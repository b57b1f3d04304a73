"""What each engine loads: a file for each, with the ways in which its units can be stored.

An engine's file holds SPACE. quantkit's formats say what there is (bits of a layout, ggml's types), so what
they gain is tried by itself; an engine's file says only what its kernels leave of that.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from quantkit.auto.units import Candidate, Choice, Preset, Unit
from quantkit.errors import USAGE, QuantkitError
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec
from quantkit.quantize.job import Job

ENGINES = {"any": "any", "llama.cpp": "llamacpp", "transformers": "transformers", "vllm": "vllm"}  # to files


class Outside(Protocol):
    """The matrices outside the blocks, replaced; see `streams.Replacer`."""

    def solve(self, unit: Unit, wanted: Sequence[Candidate]) -> Any:
        """The `curve.Errors` of a unit; what is wanted can be replaced from now on."""

    def replaced(self, unit: Unit, candidate: Candidate) -> AbstractContextManager[None]:
        """As long as it is open, the model computes with the candidate."""


class Space(Protocol):
    """Everything that may be chosen. method: whose job makes it; options: of the job whose linears are asked
    for."""

    method: str
    options: Any

    def asymmetric(self) -> Space:
        """With zero points. Raises QuantkitError where the engine leaves no choice."""

    def units(self, job: Job) -> list[Unit]:
        """What is stored alike, with its candidates."""

    def grid(self, row: LinearSpec, candidate: str) -> Grid:
        """Of a linear, by the name of a candidate."""

    def outside(self, job: Job, batches: Sequence[Any]) -> Outside | None:
        """What replaces units without a block, by these calibration ids; None where none is chosen."""

    def presets(self, units: Sequence[Unit], job: Job) -> list[Preset]:
        """What there is without a search."""

    def values(self, units: Sequence[Unit], choice: Choice) -> dict[str, Any]:
        """The recipe of a choice, by dotted keys."""


def load(name: str) -> Space:
    """The space of an engine. Raises QuantkitError for an unknown one."""
    if name not in ENGINES:
        raise QuantkitError(f"--engine {name}: no such engine", f"choose {', '.join(ENGINES)}", USAGE)
    return importlib.import_module(f"{__name__}.{ENGINES[name]}").SPACE
