"""From options to a checked job: everything is opened, resolved and checked here, before anything is
loaded."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from quantkit import __version__
from quantkit.distillation.smaller import shape, targets, training
from quantkit.distillation.smaller.options import Options
from quantkit.distillation.smaller.shape import Axis, Shape
from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation import self_text, windows
from quantkit.evaluation.windows import Windows
from quantkit.models.files import headers, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import free_memory
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.job import Request, base_name, calibrate, check_run, open_skeleton
from quantkit.quantize.prepare import plan, room
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import replacing
from quantkit.quantize.staging.folder import Staging
from quantkit.text.calibration import CalibrationSet, hold_out

SCHEMA = "quantkit.distill-smaller/1"
BYTES_TRAINED = 16  # of a parameter: itself, its gradient and AdamW's two moments, in float32
LOGITS_HELD = 6  # tensors of logits that a step holds: both models', their logarithms and gradients


@dataclass(frozen=True)
class Job:
    """A checked job. shape: of the student, with the first blocks, until some are chosen. axes: parameters
    of a block that the width goes into; reader: the linear that reads the channels, None where they stay.
    evaluated: a text to measure teacher and students on, beside the held-out one.
    """

    request: Request
    checkpoint: Checkpoint
    skeleton: Skeleton
    shape: Shape
    axes: dict[str, Axis]
    reader: str | None
    calibration: CalibrationSet
    schedule: training.Schedule
    parameters: int
    memory_bytes: int
    disk_bytes: int
    staging: Staging
    evaluated: Windows | None

    @property
    def options(self) -> Options:
        return self.request.options

    @property
    def shard_bytes(self) -> int:
        """Of the largest weight file."""
        return int(self.request.run.max_shard_gb * 1e9)

    def record(self) -> dict:
        """The versioned JSON of what it will do; once done, there is more in it."""
        return {
            "schema": SCHEMA,
            "teacher": {
                "source": self.checkpoint.source,
                "blocks": len(self.skeleton.blocks),
                "width": self.shape.width,
                "parameters": self.skeleton.parameters,
                "bytes": sum(info.nbytes for info in self.checkpoint.infos.values()),
            },
            "student": {
                "output": str(self.staging.output),
                "blocks": len(self.shape.kept),
                "width": self.shape.channels,
                "parameters": self.parameters,
            },
            "options": dataclasses.asdict(self.options),
            "calibration": self.calibration.record(),
            "schedule": dataclasses.asdict(self.schedule),
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "execution": self._execution(),
        }

    def fingerprint(self) -> dict:
        """All that decides the output's bytes. A job resumes only where this is equal."""
        return {
            "quantkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "source_sha256": self.checkpoint.sha256(),
            "method": "distill",
            "options": json.loads(json.dumps(dataclasses.asdict(self.options))),  # as it will be read again
            "calibration": self.calibration.record(),
            "schedule": dataclasses.asdict(self.schedule),
            "max_shard_gb": self.request.run.max_shard_gb,
            "execution": self._execution(),
        }

    def _execution(self) -> dict:
        return {
            "dtype": str(self.skeleton.dtype).removeprefix("torch."),
            "device": str(self.skeleton.device),
            "threads": torch.get_num_threads(),
        }


def output_of(request: Request) -> Path:
    """Where the student goes: as asked, or a name made of the teacher's and the shape."""
    options: Options = request.options
    parts = [] if options.blocks is None else [f"b{options.blocks}"]
    parts += [] if options.width is None else [f"w{options.width.replace(' ', '').replace('%', 'pc')}"]
    return request.output or Path(f"{base_name(request.source)}-{'-'.join(parts)}")


def is_done(request: Request) -> bool:
    """Whether the output of this very job is there, by its manifest: of teacher, options and seed."""
    output = output_of(request)
    if not (output / headers.MANIFEST).is_file() or Staging(output).folder.exists():
        return False
    manifest = headers.at(str(output), output).manifest or {}
    untrusted.check_schema(
        manifest, headers.MANIFEST_SCHEMA, f"{headers.MANIFEST} of {output}", "start with --overwrite"
    )
    made, text = manifest.get("job") or {}, request.calibration
    options = json.loads(json.dumps(dataclasses.asdict(request.options)))
    told = (manifest.get("source") or {}).get("name"), made.get("method"), made.get("options")
    seed = (made.get("calibration") or {}).get("seed")
    return told == (Path(request.source).name, "distill", options) and seed == text.seed


def prepare(
    request: Request, progress: Progress, evaluated: Path | None = None, dry_run: bool = False
) -> Job:
    """Open, resolve and check. Raises QuantkitError for all that would fail later.

    request.options: `Options`. evaluated: see `Job`. A dry run skips what matters only to a job that will
    run.
    """
    request.options.check()
    check_run(request.run)
    checkpoint = open_checkpoint(request.source, request.revision, request.offline, request.trust_remote_code)
    staging = _staging(request, checkpoint, dry_run)
    staged = staging.stored_fingerprint() if request.resume else None
    skeleton = open_skeleton(checkpoint, request.run, staged["execution"] if staged else {})
    shape.check_teacher(checkpoint, skeleton)
    wanted, axes, reader = _shape(request.options, checkpoint, skeleton)
    calibrated = calibrate(checkpoint, request, progress)
    trained, held_out = map(len, hold_out(calibrated.tokens))
    if request.options.self_text:
        self_text.beginning(checkpoint)
        trained = request.calibration.samples  # however little text there is to judge by
    vocabulary, seqlen = checkpoint.text_config.vocab_size, calibrated.tokens.shape[1]
    schedule = training.Schedule.of(request.options, trained, seqlen, vocabulary, request.run.batch_size)
    parameters = _parameters(skeleton, wanted, axes)
    logits = LOGITS_HELD * 4 * schedule.together * seqlen * vocabulary
    need = parameters * BYTES_TRAINED + logits
    disk = targets.nbytes(skeleton, (trained + held_out) * seqlen) + parameters * (BYTES_TRAINED + 12)
    room.check_memory(
        need, free_memory(skeleton.device), "fewer --blocks or a shorter --seqlen", skeleton.device
    )
    if not dry_run:
        plan.check_disk(staging.output.absolute(), disk)
    text = windows.load(checkpoint, evaluated, None, None, None) if evaluated else None
    return Job(
        request, checkpoint, skeleton, wanted, axes, reader, calibrated, schedule, parameters, need, disk,
        staging, text,
    )  # fmt: skip


def _staging(request: Request, checkpoint: Checkpoint, dry_run: bool) -> Staging:
    """The place of the output. Raises QuantkitError if it may not be written."""
    staging = Staging(output_of(request))
    replacing.check_source(staging.output, checkpoint.folder, "teacher")
    if not dry_run:
        staging.check(request.resume, request.overwrite)
    return staging


def _shape(
    options: Options, checkpoint: Checkpoint, skeleton: Skeleton
) -> tuple[Shape, dict[str, Axis], str | None]:
    """The student's shape, tried with the first blocks, and what it means for a block."""
    depth = len(skeleton.blocks)
    kept = tuple(range(shape.check_depth(options.blocks, depth)))
    if options.width is None:
        if len(kept) == depth:
            hint = f"choose 1 to {depth - 1}, or make it narrower with --width"
            raise QuantkitError(f"--blocks {depth} keeps all of the teacher's", hint, USAGE)
        wanted = Shape(kept)
        return wanted, shape.laid_beside(skeleton, checkpoint, wanted), None
    name, width = shape.find_width(skeleton, checkpoint)
    wanted = Shape(kept, options.channels(width), width, name)
    axes = shape.laid_beside(skeleton, checkpoint, wanted)
    return wanted, axes, shape.reader(axes, skeleton.blocks[0], checkpoint.source)


def _parameters(skeleton: Skeleton, wanted: Shape, axes: dict[str, Axis]) -> int:
    """Of the student; tied ones once."""
    inside = [sum(part.numel() for part in block.parameters()) for block in skeleton.blocks]
    count = skeleton.parameters - sum(inside) + sum(inside[index] for index in wanted.kept)
    for index in wanted.kept:
        for local, axis in axes.items():
            whole = skeleton.blocks[index].get_parameter(local)
            lost = axis.copies * (wanted.width - wanted.channels)
            count -= whole.numel() // whole.shape[axis.axis] * lost
    return count
