"""From options to a checked job: teacher and student are opened, compared and planned; nothing is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from quantkit import __version__
from quantkit.distillation import memory, publish
from quantkit.distillation.blocks import Text
from quantkit.distillation.memory import Memory
from quantkit.distillation.options import DistillOptions
from quantkit.distillation.student import Student, vectors
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, count, name_all
from quantkit.models.files import headers, untrusted
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.tokenizer_hash import difference, tokenizer_sha256
from quantkit.models.skeleton import Skeleton
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.job import base_name, calibrate, check_run, open_skeleton
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging import replacing
from quantkit.quantize.staging.folder import Staging
from quantkit.text.calibration import CalibrationSet, hold_out

SCHEMA = "quantkit.distill/1"
BATCH_TOKENS = 512  # of a step, unless --batch-size says otherwise


@dataclass(frozen=True)
class Request:
    """What the user asked for, as typed."""

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
class Job:
    """A checked job. trained: how many numbers, by what they are."""

    request: Request
    teacher: Skeleton
    student: Student
    calibration: CalibrationSet
    text: Text
    memory: Memory
    trained: dict[str, int]
    staging: Staging
    fingerprint: dict

    def record(self) -> dict:
        """What is known before it runs."""
        return {
            "schema": SCHEMA,
            "teacher": self.request.teacher,
            "student": self.request.student,
            "output": str(self.staging.output),
            "trained": self.trained,
            "options": asdict(self.request.options),
            "calibration": self.calibration.record(),
            "sequences": {
                "train": sum(map(len, self.text.train)),
                "held_out": sum(map(len, self.text.held_out)),
            },
            "memory": asdict(self.memory),
            "execution": _execution(self.student, self.text),
        }


def prepare(request: Request, progress: Progress, dry_run: bool = False) -> Job:
    """Open, compare and check. Raises QuantkitError for all that would fail later.

    A dry run skips what only matters to a job that will run: the output's place and the hashes.
    """
    request.options.check()
    check_run(request.run)
    teacher, student = open_pair(request)
    if teacher.quantized:
        progress.warn(f"{request.teacher} is compressed itself: the student learns its errors, too")
    staging = _staging(request, student, dry_run)
    staged = staging.stored_fingerprint() if request.resume else None
    if request.resume and not staged:
        progress.warn(f"nothing is staged for {staging.output}: it begins at the first block")
    adopted = staged["execution"] if staged else {}
    run = request.run if request.run.dtype != "auto" else replace(request.run, dtype="float32")
    taught = open_skeleton(teacher, run, adopted)
    taught.streams = False
    learner = Student(student, taught.dtype, taught.device)
    _check_shapes(taught, learner, request)
    trained = _trained(learner, request)
    calibrated = calibrate(teacher, request, progress)
    text = split(calibrated.tokens, request.run.batch_size or adopted.get("batch_size"))
    needed = memory.plan(taught, learner, text, request.options)
    fingerprint = {}
    if not dry_run:
        plan.check_disk(staging.output.absolute(), 2 * sum(i.nbytes for i in student.infos.values()))
        progress.phase("hashing teacher and student")
        fingerprint = {
            "quantkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "source_sha256": student.sha256(),
            "teacher_sha256": teacher.sha256(),
            "options": json.loads(json.dumps(asdict(request.options))),
            "calibration": calibrated.record(),
            "execution": _execution(learner, text),
        }
        _check_origin(student, fingerprint["teacher_sha256"], request, progress)
    return Job(request, taught, learner, calibrated, text, needed, trained, staging, fingerprint)


def is_done(request: Request) -> bool:
    """Whether --resume finds the output finished, by what its manifest says of the options."""
    output = output_of(request)
    if not request.resume or request.overwrite or Staging(output).folder.exists() or not output.exists():
        return False
    manifest = headers.at(str(output), output).manifest or {}
    untrusted.check_schema(
        manifest, headers.MANIFEST_SCHEMA, f"{headers.MANIFEST} of {output}", "start with --overwrite"
    )
    made = manifest.get("distilled") or {}
    return made.get("options") == json.loads(json.dumps(asdict(request.options)))


def open_pair(request: Request) -> tuple[Checkpoint, Checkpoint]:
    """Teacher and student. Raises QuantkitError unless the one can teach the other."""
    trusted = request.trust_remote_code
    teacher = open_checkpoint(request.teacher, request.revision, request.offline, trusted)
    student = open_checkpoint(request.student, None, request.offline, trusted)
    if teacher.folder.resolve() == student.folder.resolve():
        raise QuantkitError(
            f"{request.student} is teacher and student",
            "give the original first, then what was made of it",
            USAGE,
        )
    if not student.quantized:
        hint = f"compress it first (quantkit gptq {request.student}), or make a smaller student with --blocks"
        if teacher.quantized:
            hint = f"the teacher comes first: quantkit distill {request.student} {request.teacher}"
        raise QuantkitError(
            f"{request.student} is not quantized: all its weights are floats", hint, UNSUPPORTED
        )
    sizes = teacher.text_config.vocab_size, student.text_config.vocab_size
    if sizes[0] != sizes[1]:
        raise QuantkitError(
            f"{request.teacher} predicts {sizes[0]} tokens, {request.student} {sizes[1]}",
            hint="a student learns from the model that it was made from: give that one",
            exit_code=UNSUPPORTED,
        )
    hashes = [
        tokenizer_sha256(one.tokenizer, size) for one, size in zip((teacher, student), sizes, strict=True)
    ]
    if hashes[0] != hashes[1]:
        raise QuantkitError(
            f"{request.student} and {request.teacher} have different tokenizers: "
            + difference(teacher.tokenizer, student.tokenizer, sizes),
            hint="a student learns from the model that it was made from: give that one",
            exit_code=UNSUPPORTED,
        )
    return teacher, student


def split(tokens: Tensor, batch_size: int | None) -> Text:
    """Return batches of `tokens [samples, seqlen]` to train on, and held-out ones.

    Raises QuantkitError where none is left.
    """
    train, held_out = hold_out(tokens)
    size = batch_size or max(1, BATCH_TOKENS // tokens.shape[1])
    return Text(list(train.split(size)), list(held_out.split(size)))


def _staging(request: Request, student: Checkpoint, dry_run: bool) -> Staging:
    """The place of the output. Raises QuantkitError if it may not be written."""
    output = output_of(request)
    replacing.check_source(output, student.folder, "student")
    if student.folder.is_file() and output.is_dir():
        raise QuantkitError(
            f"{output} is a folder, the student a GGUF file", "choose another --output", USAGE
        )
    staging = Staging(output, one_file=student.folder.is_file())
    if not dry_run:
        staging.check(request.resume, request.overwrite)
    return staging


def output_of(request: Request) -> Path:
    """Where the job writes: as asked, or NAME-distilled in the current folder."""
    suffix = ".gguf" if request.student.endswith(".gguf") else ""
    return request.output or Path(f"{base_name(request.student)}-distilled{suffix}")


def _check_shapes(teacher: Skeleton, student: Student, request: Request) -> None:
    """Raise QuantkitError naming what of the two models is unlike."""
    hint = "a student learns from the model that it was made from: give that one"
    theirs, ours = len(teacher.blocks), student.depth
    if theirs != ours:
        what = f"{request.teacher} has {count(theirs, 'block')}, {request.student} {ours}"
        raise QuantkitError(what, hint, UNSUPPORTED)
    pairs = zip(teacher.blocks, student.skeleton.blocks, strict=True)
    for index, blocks in enumerate(pairs):
        shapes = [{name: list(p.shape) for name, p in block.named_parameters()} for block in blocks]
        odd = [n for n in shapes[0] | shapes[1] if shapes[0].get(n) != shapes[1].get(n)]
        if odd:
            told = [
                f"{n} is {shapes[0].get(n, 'absent')} there, {shapes[1].get(n, 'absent')} here" for n in odd
            ]
            raise QuantkitError(
                f"block {index + 1} of {request.teacher} and {request.student} differ: {name_all(told, 3)}",
                hint,
                UNSUPPORTED,
            )


def _check_origin(student: Checkpoint, teacher_sha256: str, request: Request, progress: Progress) -> None:
    """Warn where the student's manifest names other files than the teacher's. Raises QuantkitError for one of
    odd content."""
    source = (publish.manifest_of(student) or {}).get("source") or {}
    told = source.get("sha256")
    if told and told != teacher_sha256:
        progress.warn(
            f"{request.student} was made from other files than {request.teacher} ({source.get('name')}, "
            f"sha256 {told[:12]}…): goes on, as both are of one shape"
        )


def _trained(student: Student, request: Request) -> dict[str, int]:
    """How many linears, and norms and biases, there are to train. Raises QuantkitError for none."""
    if not student.rows:
        raise QuantkitError(
            f"no linear in the blocks of {request.student} has codes that quantkit writes",
            hint="compress the teacher with quantkit, and distill that",
            exit_code=UNSUPPORTED,
        )
    blocks = sum(len(vectors(block)) for block in student.skeleton.blocks)
    return {"linears": len(student.rows), "norms_and_biases": blocks + len(student.rest_names())}


def _execution(student: Student, text: Text) -> dict:
    return {
        "dtype": str(student.skeleton.dtype).removeprefix("torch."),
        "device": str(student.skeleton.device),
        "batch_size": len(text.train[0]),
        "threads": torch.get_num_threads(),
    }
