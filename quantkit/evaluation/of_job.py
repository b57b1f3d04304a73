"""What a job's `--eval` measures: the original beside what was made of it."""

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
    """The record of all of them, in float32, by every metric."""
    trusted = original.trust_remote_code
    checkpoints = [original, *(open_checkpoint(str(place), trust_remote_code=trusted) for place in made)]
    measured = evaluate.evaluate(checkpoints, windows, torch.float32, device, listen)
    return record(windows.protocol, torch.float32, device, measured, select(None))
