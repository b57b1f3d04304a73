"""Files of one model in whose blocks no solver has anything to do: encoded as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from quantkit.models.files import unchanged
from quantkit.models.gguf.imatrix import Imatrix
from quantkit.models.machine import distributed
from quantkit.models.machine.heap import keep_freed_pages
from quantkit.models.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import imatrix_job, importance
from quantkit.quantize.calibrate.states import Place
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Summary, finish
from quantkit.quantize.outputs.gguf import File
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import disk_errors
from quantkit.quantize.timings import Timings


def encode(jobs: Sequence[Job], progress: Progress) -> list[Summary]:
    """Make all of them in one pass over the source; then each is read back and published."""
    timings = Timings(jobs[0].skeleton.device)
    keep_freed_pages()
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(disk_errors(job.staging.folder, "run the same command again"))
            stack.enter_context(job.staging.opened(job.fingerprint, resume=False))
            stack.callback(job.staging.discard)
        stack.enter_context(unchanged.watched(jobs[0].checkpoint))
        imatrix = _imatrix(jobs, progress, timings)
        return distributed.broadcast(lambda: _written(jobs, imatrix, progress, timings))


def _written(
    jobs: Sequence[Job], imatrix: Imatrix | None, progress: Progress, timings: Timings
) -> list[Summary]:
    """All files, published."""
    progress.phase("writing")
    with timings("write"):
        _write(jobs, (), imatrix, progress)
    unchanged.check(jobs[0].checkpoint)
    progress.phase("verifying what was written")
    return [_publish(job, timings) for job in jobs]


def _imatrix(jobs: Sequence[Job], progress: Progress, timings: Timings) -> Imatrix | None:
    """How much input columns count, as the user gave it or as calibration text says."""
    job = next((one for one in jobs if one.method.output.gathers), jobs[0])
    output = job.method.output
    if not output.gathers:
        return output.imatrix
    gathered = importance.gather(
        job.skeleton, job.batches, progress, timings, Place(job.plan.execution.states, job.staging.folder)
    )
    job.skeleton.model.to("meta")  # its memory is needed for encoding
    return imatrix_job.as_imatrix(gathered, output.linears, job.calibration)


def _write(
    jobs: Sequence[Job], places: tuple[Path, ...], imatrix: Imatrix | None, progress: Progress
) -> None:
    """Assemble the jobs behind those that have `places`, each inside the one before it."""
    if len(places) < len(jobs):
        staging = jobs[len(places)].staging
        staging.assemble(lambda place: _write(jobs, (*places, place), imatrix, progress))
        return
    pairs = zip(jobs, places, strict=True)
    files = [File(job.method.output, job.material, place, finish.manifest(job, ())) for job, place in pairs]
    files[0].output.encode(files, imatrix, progress)


def _publish(job: Job, timings: Timings) -> Summary:
    with timings("verify"):
        written = open_checkpoint(str(job.staging.place))
        Skeleton(written, torch.float32, torch.device("cpu")).names.check_complete()
    summary = finish.summarize(job, [], timings)
    job.staging.publish()
    return summary
