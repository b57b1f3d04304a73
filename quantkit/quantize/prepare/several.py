"""The jobs of one command: one for each output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.models.files import gguf_shards
from quantkit.quantize import job, methods
from quantkit.quantize.job import Job, Request
from quantkit.quantize.prepare import finished, names
from quantkit.quantize.prepare.recipe import Choice
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace


def prepare(
    choice: Choice, progress: Progress, dry_run: bool = False, **asked: Any
) -> tuple[list[Path], list[Job]]:
    """Return the outputs of a command and its checked jobs; with `resume`, only the jobs that are left.

    asked: `resume`, `overwrite` and further fields of `Request`.
    """
    several = methods.each(choice.method, choice.options, choice.output, names.base_name(choice.model))
    requests = [
        Request(choice.model, choice.method, options, choice.calibration, choice.run, output, **asked)
        for options, output in several
    ]
    requests = [job.settled(one) for one in requests]
    outputs, overwrite = [job.output_of(one) for one in requests], asked.get("overwrite", False)
    if asked.get("resume"):
        left = finished.left(requests, overwrite)
        requests = left or (requests if overwrite else [])
    elif len(requests) > 1 and not overwrite and not dry_run:
        may_replace.check_new(outputs)
    jobs: list[Job] = []
    for one in requests:
        hashed = jobs[0].source_sha256 if jobs else None
        jobs.append(job.prepare(one, progress, dry_run, hashed))
    return [gguf_shards.first(output) for output in outputs], jobs
