"""From options to a checked job, and from there to the published student: the same way for both kinds.

A compressed student (compressed/job.py) keeps its codes, a smaller one (smaller/job.py) is cut from the
teacher. Each kind says what is trained and how it is judged. Nothing is published that does not lower the
divergence from the teacher on text that nothing was trained on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers

from quantkit import __version__
from quantkit.distillation.options import DistillOptions, SmallerOptions
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation import windows
from quantkit.evaluation.windows import Windows
from quantkit.models.files import headers, unchanged, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.job import base_name
from quantkit.quantize.prepare.plan import check_disk
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.folder import Staging, disk_errors
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import CalibrationSet


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed. student: None for one that is cut from the teacher."""

    teacher: str
    student: str | None
    options: DistillOptions | SmallerOptions
    calibration: CalibrationOptions
    run: RunOptions
    output: Path | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Job(ABC):
    """A checked job. source: what the output's bytes are made of. evaluated: a text to measure teacher and
    students on, beside the held-out one."""

    request: Request
    source: Checkpoint
    teacher: Skeleton
    calibration: CalibrationSet
    staging: Staging
    evaluated: Windows | None
    disk_bytes: int
    fingerprint: dict = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def decisive(self) -> dict:
        """What decides the output's bytes beside the source and the versions of libraries."""

    @abstractmethod
    def record(self) -> dict:
        """The versioned JSON of what the job will do; once done, there is more in it."""

    @abstractmethod
    def make(self, progress: Progress, timings: Timings) -> dict:
        """Train, decide and put the output together in the staging folder; what is to be told of it."""

    def measured(self, progress: Progress) -> dict:
        """What is to be told of the published output."""
        return {}

    def signed(self, progress: Progress) -> Job:
        """The same job with its fingerprint. Raises QuantkitError where it does not fit the disk."""
        check_disk(self.staging.output.absolute(), self.disk_bytes)
        progress.phase("hashing the source")
        fingerprint = {
            "quantkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "source_sha256": self.source.sha256(),
        }
        return replace(self, fingerprint=fingerprint | self.decisive())

    def run(self, progress: Progress) -> dict:
        """The record of what was done.

        Raises QuantkitError; what was staged survives any error, and the output appears whole or not at all.
        """
        timings = Timings(self.teacher.device)
        with disk_errors(self.staging.folder, "run the same command with --resume"):
            with self.staging.opened(self.fingerprint, self.request.resume):
                made = self.make(progress, timings)
                for checkpoint in (self.source, self.teacher.checkpoint):
                    unchanged.check(checkpoint)
                self.staging.publish()
        self.teacher.model.to("meta")  # gives its memory back
        return self.record() | made | self.measured(progress) | {"seconds": timings.seconds}


def stage(
    request: Request, source: Checkpoint, what: str, progress: Progress, dry_run: bool
) -> tuple[Staging, dict]:
    """The place of the output, and the execution of the job that is staged there, to be adopted.

    what: what the source is. Raises QuantkitError if the output may not be written.
    """
    staging = Staging(output_of(request), one_file=source.folder.is_file() and what == "student")
    may_replace.check_source(staging.output, source.folder, what)
    if staging.one_file and staging.output.is_dir():
        raise QuantkitError(
            f"{staging.output} is a folder, the student a GGUF file", "choose another --output", USAGE
        )
    if not dry_run:
        staging.check(request.resume, request.overwrite)
    staged = staging.stored_fingerprint() if request.resume else None
    if request.resume and not staged:
        progress.warn(f"nothing is staged for {staging.output}: it begins anew")
    return staging, staged["execution"] if staged else {}


def output_of(request: Request) -> Path:
    """Where the job writes: as asked, or NAME-distilled in the current folder, or NAME-b24."""
    if request.output:
        return request.output
    if request.student is not None:
        suffix = ".gguf" if request.student.endswith(".gguf") else ""
        return Path(f"{base_name(request.student)}-distilled{suffix}")
    return Path(f"{base_name(request.teacher)}-b{request.options.blocks}")


def is_done(request: Request) -> bool:
    """Whether --resume finds the output of this very job finished, by its manifest: of the options and, for a
    smaller student, of teacher and seed."""
    output = output_of(request)
    if not request.resume or request.overwrite or Staging(output).folder.exists() or not output.exists():
        return False
    manifest = headers.at(str(output), output).manifest or {}
    untrusted.check_schema(
        manifest, headers.MANIFEST_SCHEMA, f"{headers.MANIFEST} of {output}", "start with --overwrite"
    )
    options = as_read(request.options)
    if request.student is not None:
        return (manifest.get("distilled") or {}).get("options") == options
    made, source = manifest.get("job") or {}, manifest.get("source") or {}
    told = source.get("name"), made.get("method"), (made.get("calibration") or {}).get("seed")
    wanted = Path(request.teacher).name, "distill", request.calibration.seed
    return told == wanted and made.get("options") == options


def as_read(options: DistillOptions | SmallerOptions) -> dict:
    """Options as they will be read again from JSON."""
    return json.loads(json.dumps(asdict(options)))


def execution(skeleton: Skeleton, **more: int) -> dict:
    """How a job runs, as far as that decides the output's bytes."""
    dtype = str(skeleton.dtype).removeprefix("torch.")
    return {"dtype": dtype, "device": str(skeleton.device), **more, "threads": torch.get_num_threads()}


def evaluated(checkpoint: Checkpoint, text: Path | None) -> Windows | None:
    """The text of --eval. Raises QuantkitError for one that does not serve."""
    return windows.load(checkpoint, text, None, None, None) if text else None
