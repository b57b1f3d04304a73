"""Runs the jobs of one command, and compares their outputs with the original model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quantkit.evaluation import evaluate
from quantkit.evaluation.comparison import card
from quantkit.evaluation.comparison.record import record
from quantkit.evaluation.stream import Listener
from quantkit.evaluation.windows import Windows
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine import distributed
from quantkit.quantize import loop
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Summary
from quantkit.quantize.progress import Progress

JOB_SCHEMA = "quantkit.job/3"


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


def run(jobs: Sequence[Job], windows: Windows | None, progress: Progress) -> Result:
    """Run jobs; compare their outputs on the windows, if given."""
    summaries, evaluation = loop.run(jobs, progress), None
    outputs = [Path(summary.output) for summary in summaries]
    if windows:
        device = jobs[0].skeleton.device
        evaluation = measure(jobs[0].checkpoint, outputs, windows, device, progress.evaluating)
        for output in outputs if distributed.rank() == 0 else ():
            card.add(evaluation, output)
    return Result(outputs, summaries, evaluation)


def measure(
    original: Checkpoint, made: Sequence[Path | str], windows: Windows, device: torch.device, listen: Listener
) -> dict:
    """Open a job's outputs; return the JSON of original and outputs, with all metrics, in float32."""
    trusted = original.trust_remote_code
    models = [original, *(open_checkpoint(str(path), trust_remote_code=trusted) for path in made)]
    measured = evaluate.evaluate(models, windows, torch.float32, device, listen)
    return record(windows.protocol, torch.float32, device, measured)
