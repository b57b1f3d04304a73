"""Compares a job's outputs with the original model."""

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
    """Open a job's outputs; return the JSON of original and outputs, with all metrics, in float32."""
    trusted = original.trust_remote_code
    others = [open_checkpoint(str(place), trust_remote_code=trusted) for place in made]
    return compare([original, *others], windows, device, listen, select(None))


def compare(
    checkpoints: Sequence[Checkpoint], windows: Windows, device: torch.device, listen: Listener,
    chosen: frozenset[str],
) -> dict:  # fmt: skip
    """Return the JSON of checkpoints, measured in float32; the first is the original."""
    measured = evaluate.evaluate(checkpoints, windows, torch.float32, device, listen, chosen=chosen)
    return record(windows.protocol, torch.float32, device, measured, chosen)
