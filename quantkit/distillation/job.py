"""The job of a compressed student: read this first.

    block by block (blocks.py) ▶ better on held-out text? ▶ end to end (whole.py) ▶ better? ▶ publish

This file opens and compares both models and plans memory before any weights are loaded.
"""

import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor

from quantkit.distillation import blocks, publish, whole
from quantkit.distillation.blocks import Training
from quantkit.distillation.request import Request, stage
from quantkit.distillation.student import Floats, Student, vectors
from quantkit.errors import UNSUPPORTED, USAGE, name_all, refusal, require
from quantkit.evaluation import runs, windows
from quantkit.evaluation.evaluate import check_comparable
from quantkit.evaluation.windows import Windows
from quantkit.grids.distance import token_distances
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import check_unchanged, open_checkpoint
from quantkit.models.machine.memory import map_large_blocks
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.job import calibrate, execution_of, open_skeleton
from quantkit.quantize.outputs.folder import TIMINGS, write_json
from quantkit.quantize.prepare.plan import check_disk
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.fingerprint import versions
from quantkit.quantize.staging.folder import Staging, disk_errors
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import CalibrationSet, hold_out

SCHEMA = "quantkit.distill/1"
STEP_TOKENS = 512  # tokens per step without --batch-size
UNLIKE = 0.5  # relative difference of an embedding, median of all tokens, that rounding cannot cause
HINT = "give the model that the student was compressed from"


@dataclass(frozen=True)
class Job:
    """A checked job. evaluated: the text of --eval, on which teacher and students are also measured, or None.
    memory: see `whole.plan_memory`. trained: numbers of `linears` and `norms_and_biases` to train."""

    request: Request
    training: Training
    calibration: CalibrationSet
    staging: Staging
    evaluated: Windows | None
    memory: dict[str, int | bool]
    trained: dict[str, int]
    fingerprint: dict = field(default_factory=dict)

    @property
    def refused(self) -> dict | None:
        """The JSON object of the error that prevents writing the output, or None."""
        return refusal(lambda: self.staging.check(self.request.resume, self.request.overwrite))

    def record(self) -> dict:
        """Return the versioned JSON of the plan."""
        training = self.training
        return {
            "schema": SCHEMA,
            "teacher": self.request.teacher,
            "student": self.request.student,
            "output": str(self.staging.output),
            "trained": self.trained,
            "options": asdict(self.request.options),
            "calibration": self.calibration.record(),
            "sequences": {
                "train": sum(map(len, training.train)),
                "held_out": sum(map(len, training.held_out)),
            },
            "memory": self.memory,
            "execution": execution_of(self.training.student.skeleton, self.training.train),
        }

    def run(self, progress: Progress) -> dict:
        """Run the job; return `record`, results, measurements and seconds.

        Raises QuantkitError. The staging folder survives any error; the output appears whole or not at all.
        """
        teacher = self.training.teacher
        timings = Timings(teacher.device)
        with disk_errors(self.staging.folder, "run the same command with --resume"):
            with self.staging.opened(self.fingerprint, self.request.resume):
                made = self._make(progress, timings)
                for checkpoint in (self.training.student.checkpoint, teacher.checkpoint):
                    check_unchanged(checkpoint)
                self.staging.publish()
        record = self.record() | made
        if self.evaluated:
            models = [self.request.student, self.staging.output]
            measured = teacher.checkpoint, models, self.evaluated, teacher.device, progress.evaluating
            record["eval"] = runs.of_outputs(*measured)
        return record | {"seconds": timings.seconds}

    def _make(self, progress: Progress, timings: Timings) -> dict:
        """Train, decide and write the output into the staging folder; return the results as JSON."""
        training, options, hold = self.training, self.request.options, self.memory["hold"]
        student = training.student
        map_large_blocks()
        with timings("load"):
            training.teacher.load_rest()
            student.skeleton.load_rest()
        self._check_embeddings()
        steps = 2 + bool(options.epochs)
        progress.step(1, steps)
        progress.phase("running both models, block by block")
        final = blocks.walk(training, self.staging, timings, progress)
        rest = {name: value.cpu() for name, value in student.rest().floats.items()}
        with timings("measure"):
            before = best = training.divergence(final.teacher, final.before, rest)
            after = training.divergence(final.teacher, final.after, rest) if options.block_epochs else before
        stages, floats = [], None
        if options.block_epochs:
            stages.append(_stage("block by block", before, after, progress))
            if after < best:
                best, floats = after, final.floats | rest
        if options.epochs:
            start = floats or student.floats(hold) | rest
            learner = whole.EndToEnd(training, final, start, hold)
            progress.step(2, steps)
            progress.phase("training end to end")
            with timings("end to end"):
                curve = learner.train(best, self.staging, progress)
            divergences, step = list(curve.values()), whole.best_step(curve, best)
            stage = _stage("end to end", best, min(divergences), progress)
            stages.append(stage | {"epochs": divergences, "epoch": step // len(training.train)})
            if step:
                best, floats = min(divergences), whole.best(self.staging)
        if floats is None:
            output = self.staging.output
            progress.warn(
                f"nothing lowered the divergence on held-out text: {output} holds the student as it was"
            )
        done = {"stages": stages, "before": before, "after": best}
        progress.step(steps, steps)
        training.teacher.free()  # the output is read back beside the student
        self._write(floats, self._described() | done, progress, timings)
        return done | {"improved": floats is not None}

    def _write(self, floats: Floats | None, record: dict, progress: Progress, timings: Timings) -> None:
        """Write the output to the staging folder and verify it. floats: None keeps the student's own."""
        student = self.training.student
        progress.phase("writing the checkpoint")
        with timings("write"), self.staging.assemble() as target:
            publish.write(student, floats, record, target, self.staging.output)
        progress.phase("verifying what was written")
        with timings("verify"):
            publish.verify(student, floats, target, self.training.held_out[0])
        if target.is_dir():
            write_json(target / TIMINGS, {"seconds": timings.seconds, "steps_down": []})

    def _described(self) -> dict:
        """Return the job's entry for the manifest; it contains no times or paths."""
        teacher, student, made = self.request.teacher, self.request.student, self.fingerprint
        return {
            "teacher": {"name": Path(teacher).name, "sha256": made["teacher_sha256"]},
            "student": {"name": Path(student).name, "sha256": made["source_sha256"]},
            "trained": self.trained,
            "options": made["options"],
            "calibration": made["calibration"],
            "held_out": sum(map(len, self.training.held_out)),
            "execution": made["execution"],
        }

    def _check_embeddings(self) -> None:
        """Raise QuantkitError if the embeddings differ by more than rounding can explain: the student was
        then made from another model."""
        models = self.training.teacher.model, self.training.student.skeleton.model
        theirs, ours = (model.get_input_embeddings().weight for model in models)
        made = f"{self.request.student} was not made from {self.request.teacher}"
        like = theirs.shape == ours.shape and token_distances(ours, theirs).median() <= UNLIKE
        require(like, f"{made}: their embeddings have nothing in common", HINT, UNSUPPORTED)


def prepare(request: Request, progress: Progress, text: Path | None = None, dry_run: bool = False) -> Job:
    """Open and check teacher and student, and plan the job. Raises QuantkitError for invalid input.

    text: file of --eval. A dry run does not check whether the output exists and computes no hashes.
    """
    request.options.check()
    request.run.check()
    teacher, student = open_pair(request)
    publish.manifest_of(student)  # rejects an invalid manifest before training
    if teacher.quantized:
        progress.warn(f"{request.teacher} is compressed itself: the student also learns its errors")
    staging, adopted = stage(request, student, progress, dry_run)
    run = request.run if request.run.dtype != "auto" else replace(request.run, dtype="float32")
    taught = open_skeleton(teacher, run, adopted)
    taught.streams = False
    learner = Student(student, taught.dtype, taught.device)
    _check_shapes(taught, learner, request)
    trained = _trained(learner, request)
    calibrated, (train, held_out) = _text(teacher, request, progress)
    size = run.batch_size or adopted.get("batch_size") or max(1, STEP_TOKENS // train.shape[1])
    batches = list(train.split(size)), list(held_out.split(size))
    training = Training(taught, learner, request.options, request.calibration.seed, *batches)
    memory = whole.plan_memory(training)
    held = windows.load(teacher, text, column=request.calibration.text_column) if text else None
    job = Job(request, training, calibrated, staging, held, memory, trained)
    if dry_run:
        return job
    check_disk(staging.output.absolute(), 2 * learner.checkpoint.stored_bytes)
    progress.phase("hashing the source")
    fingerprint = {  # all that the output depends on
        **versions(),
        "source_sha256": learner.checkpoint.sha256(),
        "teacher_sha256": taught.checkpoint.sha256(),
        "options": asdict(request.options),
        "calibration": calibrated.record(),
        "execution": execution_of(learner.skeleton, training.train),
    }
    return replace(job, fingerprint=fingerprint)


def _text(
    teacher: Checkpoint, request: Request, progress: Progress
) -> tuple[CalibrationSet, tuple[Tensor, Tensor]]:
    """Return the text, and its sequences to train on and to hold out. The latter follow the `--samples`
    sequences, on which the student was probably calibrated; if the text has no more, they are the last."""
    calibrated = calibrate(teacher, replace(request, calibration=request.text), progress)
    tokens, samples = calibrated.tokens, request.calibration.samples
    if len(tokens) > samples:
        return calibrated, (tokens[:samples], tokens[samples:])
    return calibrated, hold_out(tokens)


def open_pair(request: Request) -> tuple[Checkpoint, Checkpoint]:
    """Return teacher and student. Raises QuantkitError if they cannot be a model and its compressed copy."""
    teacher = open_checkpoint(request.teacher, **request.opening)
    student = open_checkpoint(request.student, **request.opening | {"revision": None})
    apart = teacher.folder.resolve() != student.folder.resolve()
    hint = "give the original model first, then the compressed model"
    require(apart, f"{request.student} is teacher and student", hint, USAGE)
    what = f"{request.student} is not quantized: all its weights are floats"
    hint = f"compress it first: {shlex.join(['quantkit', 'gptq', request.student])}"
    if teacher.quantized:
        swapped = shlex.join(["quantkit", "distill", request.student, request.teacher])
        hint = f"the teacher comes first: {swapped}"
    require(student.quantized, what, hint, UNSUPPORTED)
    check_comparable((teacher, student), HINT)
    return teacher, student


def _check_shapes(teacher: Skeleton, student: Student, request: Request) -> None:
    """Raise QuantkitError, with names, if parameters of the blocks differ in shape between the models."""
    theirs, ours = (skeleton.names.shapes for skeleton in (teacher, student.skeleton))
    inside = f"{teacher.names.blocks}."
    odd = [n for n in theirs | ours if n.startswith(inside) and theirs.get(n) != ours.get(n)]
    what = f"{request.teacher} and {request.student} differ: {name_all(odd, 3)}"
    require(not odd, what, HINT, UNSUPPORTED)


def _trained(student: Student, request: Request) -> dict[str, int]:
    """Return the numbers of linears, and of norms and biases, to train. Raises QuantkitError without any
    linears."""
    what = f"no linear in the blocks of {request.student} has codes that quantkit writes"
    require(student.specs, what, "compress the teacher with quantkit, and distill that", UNSUPPORTED)
    blocks = sum(len(vectors(block)) for block in student.skeleton.blocks)
    return {"linears": len(student.specs), "norms_and_biases": blocks + len(student.rest().dtypes)}


def _stage(name: str, before: float, after: float, progress: Progress) -> dict:
    """Report the divergences before and after a stage; return the stage's entry of the record."""
    kept = after < before
    verdict = "kept" if kept else "not kept"
    progress.phase(f"{name}: held-out KL divergence {before:.5f} → {after:.5f}, {verdict}")
    return {"name": name, "before": before, "after": after, "kept": kept}
