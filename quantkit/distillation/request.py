"""The request, the output and the staging folder of a distillation job."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantkit.distillation.options import DistillOptions
from quantkit.errors import UNSUPPORTED, require
from quantkit.models.files import gguf_shards, headers, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.gguf_shards import base_name
from quantkit.models.files.open import open_checkpoint
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.prepare import finished
from quantkit.quantize.prepare.request import JobFlags
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import may_replace
from quantkit.quantize.staging.fingerprint import differences
from quantkit.quantize.staging.folder import Staging
from quantkit.text import calibration


@dataclass(frozen=True)
class Request(JobFlags):
    """The options that the user gave."""

    teacher: str
    student: str
    options: DistillOptions
    calibration: CalibrationOptions
    run: RunOptions

    @property
    def destination(self) -> Path:
        """Return --output; by default NAME-distilled in the current folder."""
        suffix = ".gguf" if self.student.endswith(".gguf") else ""
        return gguf_shards.destination(self.output, f"{base_name(self.student)}-distilled{suffix}")

    @property
    def text(self) -> CalibrationOptions:
        """Return options of the text with sequences to hold out, which follow the `--samples` sequences."""
        samples = self.calibration.samples
        return replace(self.calibration, samples=samples + calibration.most_held_out(samples))


def stage(request: Request, source: Checkpoint, progress: Progress, dry_run: bool) -> tuple[Staging, dict]:
    """Return the output's staging folder, and the `execution` of an unfinished job there ({} without one).

    source: the student. Raises QuantkitError if the output may not be written.
    """
    whole, hint = gguf_shards.whole(source.folder), "join them first: llama-gguf-split --merge FIRST OUTPUT"
    require(whole == source.folder, f"distill writes no shards: {request.student}", hint, UNSUPPORTED)
    staging = Staging(request.destination, one_file=source.folder.is_file())
    may_replace.check_source(staging.output, source.folder, "student")
    if not dry_run:
        staging.check(request.resume, request.overwrite)
    staged = staging.stored_fingerprint() if request.resume else None
    if request.resume and not staged:
        progress.phase(f"no unfinished job for {staging.output}: starting at the first step")
    return staging, staged["execution"] if staged else {}


def is_done(request: Request) -> bool:
    """Return whether --resume has nothing to do: the output is finished. Raises QuantkitError if another job
    made it: with models of other names, other options or another text."""
    output = request.destination
    if not request.resume or request.overwrite or Staging(output).folder.exists() or not output.exists():
        return False
    manifest = headers.at(str(output), output).manifest or {}
    untrusted.check_schema(
        manifest, headers.MANIFEST_SCHEMA, f"{headers.MANIFEST} of {output}", "start with --overwrite"
    )
    made, asked = manifest.get("distilled") or {}, {"options": asdict(request.options)}
    for key in ("teacher", "student"):
        model = made.get(key)
        asked[key] = (model if isinstance(model, dict) else {}) | {"name": Path(getattr(request, key)).name}
    if not (different := differences({key: made.get(key) for key in asked}, asked)):
        teacher = open_checkpoint(request.teacher, **request.opening)
        text = json.loads(json.dumps(calibration.load(teacher, request.text, request.offline).record()))
        different = differences({"calibration": made.get("calibration")}, {"calibration": text})
    finished.refuse_other(output, different)
    return True
