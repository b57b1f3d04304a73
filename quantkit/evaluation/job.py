"""One evaluation: open checkpoints and text, measure, and return the record."""

from collections.abc import Sequence
from pathlib import Path

import torch

from quantkit.evaluation import evaluate, metrics, windows
from quantkit.evaluation.comparison import card, gates
from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.engines import Engine
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.tasks import Tasks
from quantkit.models import kv_types
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import distributed
from quantkit.models.machine.device import choose_device
from quantkit.quantize.progress import Progress
from quantkit.text import sources


def measure(
    models: Sequence[str], asked: EvalSettings, progress: Progress, revision: str | None = None,
    offline: bool = False, trust_remote_code: bool = False, described: Path | None = None,
) -> dict:  # fmt: skip
    """Compare checkpoints with the first; return the JSON of `quantkit eval`, failed gates included.

    revision: revision of the first model. described: folder of the model whose card gets the results.
    """
    asked.check()
    chosen = metrics.select(asked.metrics)
    limits = gates.parse(*asked.limits)
    caches = list(dict.fromkeys(map(kv_types.measured, asked.kv_dtype)))
    gates.check(limits, chosen, (len(models) + len(asked.trials)) * (1 + len(caches)) - 1)
    engine = Engine.find(asked.engine, asked.python, asked.engine_option)
    if described:
        card.check(described, models)
    checkpoints = [
        open_checkpoint(model, None if position else revision, offline, trust_remote_code)
        for position, model in enumerate(models)
    ]
    precision, device = getattr(torch, asked.dtype), choose_device(asked.device)
    sources.check_column(asked.text, asked.text_column)
    text = windows.load(
        checkpoints[0], asked.text, asked.ctx, asked.stride, asked.limit, offline, asked.text_column
    )
    if text.note:
        progress.warn(text.note)
    harness = Tasks.prepare(asked.tasks, asked.task_limit) if asked.tasks else None
    measured = evaluate.evaluate(
        checkpoints, text, precision, device, progress.evaluating, asked.trials, chosen, harness, caches,
        asked.weights_only, asked.max_memory, engine,
    )  # fmt: skip
    task_settings = harness.record() if harness else None
    made = record(text.protocol, precision, device, measured, limits, task_settings)
    if described and distributed.rank() == 0:
        card.add(made, described)
    return made
