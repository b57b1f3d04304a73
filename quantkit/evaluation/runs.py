"""Whole evaluations: of checkpoints that the user names, and of the outputs of jobs, which it runs before."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quantkit.evaluation import evaluate, metrics
from quantkit.evaluation.comparison import card, gates
from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.engines import Engine
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.stream import Listener
from quantkit.evaluation.tasks import Tasks
from quantkit.evaluation.windows import Windows, load
from quantkit.models import kv_types
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import distributed
from quantkit.models.machine.device import choose_device
from quantkit.quantize import loop
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Summary
from quantkit.quantize.progress import Progress
from quantkit.text import sources

JOB_SCHEMA = "quantkit.job/3"


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
    trials = tuple(dict.fromkeys(asked.trials))
    gates.check(limits, chosen, (len(models) + len(trials)) * (1 + len(caches)) - 1)
    engine = Engine.find(asked.engine, asked.python, asked.engine_option)
    if described:
        card.check(described, models)
    checkpoints = [
        open_checkpoint(model, None if position else revision, offline, trust_remote_code)
        for position, model in enumerate(models)
    ]
    precision, device = getattr(torch, asked.dtype), choose_device(asked.device)
    sources.check_column(asked.text, asked.text_column)
    text = load(checkpoints[0], asked.text, asked.ctx, asked.stride, asked.limit, offline, asked.text_column)
    if text.note:
        progress.warn(text.note)
    harness = Tasks.prepare(asked.tasks, asked.task_limit) if asked.tasks else None
    measured = evaluate.evaluate(
        checkpoints, text, precision, device, progress.evaluating, trials, chosen, harness, caches,
        asked.weights_only, asked.max_memory, engine,
    )  # fmt: skip
    if asked.weights_only and not any(model["weights_only"] for model in measured["models"]):
        progress.warn("--weights-only: no model quantizes activations")
    task_settings = harness.record() if harness else None
    made = record(text.protocol, precision, device, measured, limits, task_settings)
    if described and distributed.rank() == 0:
        card.add(made, described)
    return made


@dataclass(frozen=True)
class Result:
    """The outputs of a command. summaries: one for each output. evaluation: the JSON of `quantkit eval`, if
    it was requested. finished: whether `resume` found all outputs finished."""

    outputs: list[Path]
    summaries: list[Summary]
    evaluation: dict | None = None
    finished: bool = False

    @property
    def output(self) -> Path:
        """The folder or file that was written, the first of several."""
        return self.outputs[0]

    def record(self) -> dict:
        """Return the JSON of `--json`."""
        measured = {"eval": self.evaluation} if self.evaluation else {}
        head = {"schema": JOB_SCHEMA} | ({"finished": True} if self.finished else {})
        records = [head | asdict(summary) | measured for summary in self.summaries]
        return merged(records or [head | {"output": str(output)} for output in self.outputs])


def merged(records: Sequence[dict]) -> dict:
    """Return one JSON object; several outputs of one command are a list inside it."""
    return records[0] if len(records) == 1 else {"schema": "quantkit.jobs/1", "jobs": list(records)}


def run(jobs: Sequence[Job], text: Path | str | None, progress: Progress) -> Result:
    """Run jobs; compare their outputs on a text, if given. An unsuitable text is refused first."""
    checkpoint, column = jobs[0].checkpoint, jobs[0].request.calibration.text_column
    windows = load(checkpoint, text, column=column) if text is not None else None
    summaries, evaluation = loop.run(jobs, progress), None
    outputs = [Path(summary.output) for summary in summaries]
    if windows:
        device = jobs[0].skeleton.device
        evaluation = of_outputs(checkpoint, outputs, windows, device, progress.evaluating)
        for output in outputs if distributed.rank() == 0 else ():
            card.add(evaluation, output)
    return Result(outputs, summaries, evaluation)


def of_outputs(
    original: Checkpoint, made: Sequence[Path | str], windows: Windows, device: torch.device, listen: Listener
) -> dict:
    """Open a job's outputs; return the JSON of original and outputs, with all metrics, in float32."""
    trusted = original.trust_remote_code
    models = [original, *(open_checkpoint(str(path), trust_remote_code=trusted) for path in made)]
    measured = evaluate.evaluate(models, windows, torch.float32, device, listen)
    return record(windows.protocol, torch.float32, device, measured)
