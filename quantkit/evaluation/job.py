"""One evaluation: open checkpoints and text, measure, and return the record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantkit.evaluation import evaluate, windows
from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.settings import Settings
from quantkit.evaluation.tasks import Tasks
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.quantize.progress import Progress


def measure(
    models: Sequence[str], asked: Settings, progress: Progress,
    revision: str | None = None, offline: bool = False, trust_remote_code: bool = False,
) -> dict:  # fmt: skip
    """Compare checkpoints with the first; return the JSON of `quantkit eval`. revision: of the first.

    A gate that failed is in the record: see `gates.refuse_failed`."""
    checkpoints = [
        open_checkpoint(model, None if position else revision, offline, trust_remote_code)
        for position, model in enumerate(models)
    ]
    precision, place = getattr(torch, asked.dtype), choose_device(asked.device)
    text = windows.load(checkpoints[0], asked.text, asked.ctx, asked.stride, asked.limit, offline)
    if text.note:
        progress.warn(text.note)
    harness = Tasks.prepare(asked.tasks, asked.task_limit) if asked.tasks else None
    measured = evaluate.evaluate(
        checkpoints, text, precision, place, progress.evaluating, asked.trials, asked.chosen, harness,
        asked.caches, asked.weights_only, asked.memory_bytes,
    )  # fmt: skip
    given = harness.record() if harness else None
    return record(text.protocol, precision, place, measured, asked.chosen, asked.gates, given)
