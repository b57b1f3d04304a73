"""Outputs: what a finished job publishes. A checkpoint folder, or one GGUF file; a file for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from quantkit.layouts import Layout, LinearSpec
    from quantkit.models.checkpoint import Checkpoint
    from quantkit.quantize.finish import Summary
    from quantkit.quantize.job import Job
    from quantkit.quantize.progress import Progress


class Output(Protocol):
    """How staged blocks and what no solver touched become something to publish.

    needs: statistics of calibration text that it works from itself.
    """

    needs: frozenset[str]

    def sizes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec], layout: Layout) -> Sizes:
        """What will be written, exact from shapes."""

    def planned(self, job: Job) -> list[Planned]:
        """What becomes of every matrix."""

    def install_rest(self, job: Job, progress: Progress) -> None:
        """Let what lies outside the blocks compute as it will be stored, before the first block runs."""

    def write(self, job: Job, place: Path, records: Sequence[dict]) -> None:
        """Write it all at `place`, where nothing is yet; `records` are what is known of each linear."""

    def describe(self, job: Job, place: Path, summary: Summary) -> None:
        """Add what people read beside the tensors, once those have been verified."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of all tensors, and of the quantized linears among them, which have so many weights."""

    total: int
    quantized: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized linears."""
        return 8 * self.quantized / self.weights


class Planned(NamedTuple):
    """A matrix of the output: its name inside its block (or its own, outside), and what it becomes."""

    name: str
    block: int | None
    shape: tuple[int, int]
    becomes: str
