"""Outputs: what a finished job publishes. A checkpoint folder, or one GGUF file; a file for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quantkit.checkpoint import Checkpoint
    from quantkit.finish import Summary
    from quantkit.job import Job
    from quantkit.skeleton import Skeleton
    from quantkit.spec import LinearSpec


class Output(Protocol):
    """How staged blocks and what no solver touched become something to publish."""

    def rest_bytes(self, checkpoint: Checkpoint, specs: Sequence[LinearSpec]) -> int:
        """Bytes of all tensors that are written besides the quantized linears."""

    def install_rest(self, skeleton: Skeleton) -> None:
        """Let what lies outside the blocks compute as it will be stored, before the first block runs."""

    def write(self, job: Job, place: Path, records: Sequence[dict]) -> None:
        """Write it all at `place`, where nothing is yet; `records` are what is known of each linear."""

    def describe(self, job: Job, place: Path, summary: Summary) -> None:
        """Add what people read beside the tensors, once those have been verified."""
