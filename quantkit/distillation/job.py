"""The steps of a distillation job around the training: options, staging folder, published student.

compressed/job.py defines what is trained and how a student is judged. Trained values are published only if
they lower the divergence from the teacher on held-out text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers

from quantkit import __version__
from quantkit.distillation.options import DistillOptions
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require
from quantkit.evaluation import windows
from quantkit.evaluation.windows import Windows
from quantkit.models.files import gguf_shards, headers, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import check_unchanged
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
    """The options that the user gave."""

    teacher: str
    student: str
    options: DistillOptions
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
    """A checked job. source: the checkpoint that the output is made from. evaluated: the text of --eval, on
    which teacher and students are also measured, or None. disk_bytes: disk space needed."""

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
        """Return the settings on which the output's bytes depend, except the source and versions of
        libraries."""

    @abstractmethod
    def record(self) -> dict:
        """Return the versioned JSON of the plan."""

    @abstractmethod
    def make(self, progress: Progress, timings: Timings) -> dict:
        """Train, decide and write the output into the staging folder; return the results as JSON."""

    def measured(self, progress: Progress) -> dict:
        """Measure the published output on the text of --eval; return JSON, {} if there is nothing to do."""
        return {}

    def signed(self, progress: Progress) -> Job:
        """Return the job with its fingerprint. Raises QuantkitError if the disk is too small."""
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
        """Run the job; return `record`, results, measurements and seconds.

        Raises QuantkitError. The staging folder survives any error; the output appears whole or not at all.
        """
        timings = Timings(self.teacher.device)
        with disk_errors(self.staging.folder, "run the same command with --resume"):
            with self.staging.opened(self.fingerprint, self.request.resume):
                made = self.make(progress, timings)
                for checkpoint in (self.source, self.teacher.checkpoint):
                    check_unchanged(checkpoint)
                self.staging.publish()
        self.teacher.model.to("meta")  # frees the teacher's memory
        return self.record() | made | self.measured(progress) | {"seconds": timings.seconds}


def stage(request: Request, source: Checkpoint, progress: Progress, dry_run: bool) -> tuple[Staging, dict]:
    """Return the output's staging folder, and the `execution` of an unfinished job there ({} without one).

    source: the student. Raises QuantkitError if the output may not be written.
    """
    several = gguf_shards.whole(source.folder) != source.folder
    hint = "join its shards first: llama-gguf-split --merge FIRST-SHARD OUTPUT"
    require(not several, f"distill writes no shards, but {request.student} is in shards", hint, UNSUPPORTED)
    staging = Staging(output_of(request), one_file=source.folder.is_file())
    may_replace.check_source(staging.output, source.folder, "student")
    if staging.one_file and staging.output.is_dir():
        raise QuantkitError(f"{staging.output} is a folder, not a GGUF file", "choose another -o", USAGE)
    if not dry_run:
        staging.check(request.resume, request.overwrite)
    staged = staging.stored_fingerprint() if request.resume else None
    if request.resume and not staged:
        progress.warn(f"no unfinished job for {staging.output}: starting at the first step")
    return staging, staged["execution"] if staged else {}


def output_of(request: Request) -> Path:
    """Return --output; by default NAME-distilled in the current folder."""
    suffix = ".gguf" if request.student.endswith(".gguf") else ""
    return request.output or Path(f"{base_name(request.student)}-distilled{suffix}")


def is_done(request: Request) -> bool:
    """Return whether --resume has nothing to do: the output is finished, with the same options."""
    output = output_of(request)
    if not request.resume or request.overwrite or Staging(output).folder.exists() or not output.exists():
        return False
    manifest = headers.at(str(output), output).manifest or {}
    untrusted.check_schema(
        manifest, headers.MANIFEST_SCHEMA, f"{headers.MANIFEST} of {output}", "start with --overwrite"
    )
    return (manifest.get("distilled") or {}).get("options") == as_read(request.options)


def as_read(options: DistillOptions) -> dict:
    """Return the options as JSON stores them."""
    return json.loads(json.dumps(asdict(options)))


def execution(skeleton: Skeleton, **more: int) -> dict:
    """Return dtype, device, threads and `more` of a job as JSON: the output's bytes depend on these."""
    dtype = str(skeleton.dtype).removeprefix("torch.")
    return {"dtype": dtype, "device": str(skeleton.device), **more, "threads": torch.get_num_threads()}


def evaluated(checkpoint: Checkpoint, text: Path | None) -> Windows | None:
    """Return the text of --eval as windows, or None. Raises QuantkitError for an unsuitable text."""
    return windows.load(checkpoint, text, None, None, None) if text else None
