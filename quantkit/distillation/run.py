"""A job from its first block to the published student. Read this first.

    block by block (blocks.py) ▶ better on held-out text? ▶ end to end (whole.py) ▶ better? ▶ publish

Nothing is kept that does not lower the divergence from the teacher on text that nothing was trained on.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from quantkit.distillation import blocks, divergence, publish, training, whole
from quantkit.distillation.blocks import Final
from quantkit.distillation.job import Job
from quantkit.distillation.student import Floats
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.distance import relative_distance
from quantkit.models.files import unchanged
from quantkit.models.machine.memory import map_large_blocks
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.outputs.folder import TIMINGS
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import disk_errors
from quantkit.quantize.timings import Timings

UNLIKE = 0.5  # relative difference of two embeddings that no rounding makes


def run(job: Job, progress: Progress) -> dict:
    """Train, decide, write, verify, publish; the record of it.

    Raises QuantkitError; what was staged survives any error, and the output appears whole or not at all.
    """
    map_large_blocks()
    with disk_errors(job.staging.folder), job.staging.opened(job.fingerprint, job.request.resume):
        return _Run(job, progress).run()


class _Run:
    """One job on its way."""

    def __init__(self, job: Job, progress: Progress):
        self.job, self.progress = job, progress
        self.teacher, self.student, self.staging = job.teacher, job.student, job.staging
        self.timings = Timings(job.teacher.device)
        with self.timings("load"):
            self.teacher.load_rest()
            self.student.skeleton.load_rest()
        _check_embeddings(job)

    def run(self) -> dict:
        options, text = self.job.request.options, self.job.text
        seed = self.job.request.calibration.seed
        first = blocks.Plan(options.block_epochs, options.block_lr, seed)
        final = blocks.walk(
            self.teacher, self.student, text, first, self.staging, self.timings, self.progress
        )
        rest = {name: value.cpu() for name, value in self.student.rest().items()}
        with self.timings("measure"):
            before = best = self._divergence(final, final.before)
            after = self._divergence(final, final.after) if options.block_epochs else before
        stages, floats = [], None
        if options.block_epochs:
            stages.append(self._stage("block by block", before, after))
            if after < best:
                best, floats = after, self._named(final.floats) | rest
        if options.epochs:
            start = floats or self._named(self._stored_floats()) | rest
            curve = self._end_to_end(final, start, best)
            told, step = list(curve.values()), training.best_step(curve, best)
            reached, epoch = min(told), step // len(text.train)
            stages.append(self._stage("end to end", best, reached) | {"epochs": told, "epoch": epoch})
            if step:
                best, floats = reached, training.best(self.staging)
        return self._publish(floats, stages, before, best)

    def _end_to_end(self, final: Final, start: Floats, best: float) -> training.Curve:
        options, text = self.job.request.options, self.job.text
        plan = whole.Plan(
            options.epochs,
            options.lr,
            options.temperature,
            self.job.request.calibration.seed,
            self.job.memory.hold,
        )
        learner = whole.EndToEnd(self.teacher, self.student, final, start, plan, text)
        with self.timings("end to end"):
            return training.train(
                learner, learner.steps, len(text.train), best, self.staging, self.progress, "end to end"
            )

    def _divergence(self, final: Final, states: States) -> float:
        """Of a student's final hidden states of the held-out text."""
        vocabulary = self.student.checkpoint.text_config.vocab_size
        pairs = zip(final.teacher, states, strict=True)
        return divergence.mean(self.teacher.logits, self.student.skeleton.logits, pairs, vocabulary)

    def _named(self, floats: list[Floats]) -> Floats:
        """Those of all blocks by their names in the model."""
        of_block = self.student.skeleton.names.of_block
        return {of_block(i, name): value for i, some in enumerate(floats) for name, value in some.items()}

    def _stored_floats(self) -> list[Floats]:
        found = []
        for index in range(self.student.depth):
            with self.student.block(index, self.job.memory.hold) as block:
                found.append({name: value.cpu() for name, value in block.floats.items()})
        return found

    def _stage(self, name: str, before: float, after: float) -> dict:
        """What is said of a stage, at once and in the record."""
        kept = after < before
        verdict = "kept" if kept else "not kept"
        self.progress.phase(f"{name}: held-out KL divergence {before:.5f} → {after:.5f}, {verdict}")
        return {"name": name, "before": before, "after": after, "kept": kept}

    def _publish(self, floats: Floats | None, stages: list[dict], before: float, after: float) -> dict:
        job = self.job
        if floats is None:
            self.progress.warn(
                f"nothing lowered the divergence on held-out text: {job.staging.output} holds the student as "
                "it was"
            )
        described = _described(job, stages, before, after)
        self.progress.phase("writing the checkpoint")
        with self.timings("write"):
            name = self.staging.output.name
            place = self.staging.assemble(
                lambda place: publish.write(self.student, floats, described, place, name)
            )
        for model in (self.teacher, self.student.skeleton):
            unchanged.check(model.checkpoint)
        self.progress.phase("verifying what was written")
        with self.timings("verify"):
            ids = job.text.held_out[0]
            expected = self._final_states(ids, floats)
            publish.verify(self.student, place, ids, expected, job.request.trust_remote_code)
        if place.is_dir():
            record = {"seconds": self.timings.seconds, "steps_down": []}
            (place / TIMINGS).write_text(json.dumps(record, indent=2) + "\n")
        self.staging.publish()
        self.teacher.model.to("meta")  # gives its memory back
        return job.record() | {
            "stages": stages,
            "before": before,
            "after": after,
            "improved": floats is not None,
            "seconds": self.timings.seconds,
        }

    def _final_states(self, ids: Tensor, floats: Floats | None) -> Tensor:
        """Of the student as it is to be written."""
        of_block = self.student.skeleton.names.of_block
        hidden = self.student.skeleton.embed(ids)
        for index in range(self.student.depth):
            with self.student.block(index, self.job.memory.hold) as block:
                place = hidden.device
                now = block.floats
                if floats is not None:
                    now = {name: floats[of_block(index, name)].to(place) for name in block.floats}
                (hidden,) = self.student.outputs(block, [hidden], now)
        return hidden


def _described(job: Job, stages: list[dict], before: float, after: float) -> dict:
    """What the manifest says of it; nothing in it depends on time or place."""
    return {
        "teacher": {"name": Path(job.request.teacher).name, "sha256": job.fingerprint["teacher_sha256"]},
        "student": {"name": Path(job.request.student).name, "sha256": job.fingerprint["source_sha256"]},
        "trained": job.trained,
        "options": job.fingerprint["options"],
        "calibration": job.calibration.record(),
        "held_out": sum(map(len, job.text.held_out)),
        "execution": job.fingerprint["execution"],
        "stages": stages,
        "before": before,
        "after": after,
    }


def _check_embeddings(job: Job) -> None:
    """Raise QuantkitError unless the student was made from this teacher, or one much like it: no layout does
    more to an embedding than round it."""
    theirs, ours = (
        skeleton.model.get_input_embeddings().weight for skeleton in (job.teacher, job.student.skeleton)
    )
    if theirs.shape != ours.shape:
        apart = float("inf")
    else:
        apart = relative_distance(ours, theirs)
    if not apart <= UNLIKE:
        raise QuantkitError(
            f"{job.request.student} was not made from {job.request.teacher}: their embeddings have nothing "
            "in common",
            hint="give the model that it was compressed from",
            exit_code=UNSUPPORTED,
        )
