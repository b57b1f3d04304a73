"""The jobs of one command: one for each output."""

from __future__ import annotations

from pathlib import Path

from quantkit.models.files import gguf_shards
from quantkit.quantize import job
from quantkit.quantize.job import Job
from quantkit.quantize.prepare import finished
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace


def prepare(request: Request, progress: Progress, dry_run: bool = False) -> tuple[list[Path], list[Job]]:
    """Return the outputs of a command and its checked jobs; with `resume`, only the jobs that are left."""
    requests = [job.settled(single) for single in request.each()]
    outputs = [single.destination for single in requests]
    if request.resume:
        left = finished.left(requests, request.overwrite)
        requests = left or (requests if request.overwrite else [])
    elif len(requests) > 1 and not request.overwrite and not dry_run:
        may_replace.check_new(outputs)
    jobs: list[Job] = []
    for single in requests:
        hashed = jobs[0].source_sha256 if jobs else None
        jobs.append(job.prepare(single, progress, dry_run, hashed))
    return [gguf_shards.first(output) for output in outputs], jobs
