"""What a job tells of models that were made: the original beside them, as a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quantkit.evaluation import evaluate
from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.metrics import select
from quantkit.evaluation.stream import Listener
from quantkit.evaluation.windows import Windows
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint


def measure(
    original: Checkpoint, made: Sequence[Path | str], windows: Windows, device: torch.device, listen: Listener
) -> dict:
    """The record of all of them, by every metric."""
    trusted = original.trust_remote_code
    others = [open_checkpoint(str(place), trust_remote_code=trusted) for place in made]
    return compare([original, *others], windows, device, listen, select(None))


def compare(
    checkpoints: Sequence[Checkpoint], windows: Windows, device: torch.device, listen: Listener,
    chosen: frozenset[str],
) -> dict:  # fmt: skip
    """The record of checkpoints, the first of which is the original, in float32."""
    measured = evaluate.evaluate(checkpoints, windows, torch.float32, device, listen, chosen=chosen)
    return record(windows.protocol, torch.float32, device, measured, chosen)
