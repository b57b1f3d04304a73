"""The job of a smaller student: choose blocks, cut, prove, train, judge, publish.

Everything is opened, resolved and checked before anything is loaded. Each stage leaves its results in the
staging folder, from which `--resume` goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.distillation.job import Job, Request, as_read, evaluated, execution, stage
from quantkit.distillation.smaller import blocks, cut, learner
from quantkit.distillation.smaller.learner import Targets
from quantkit.distillation.training import best, best_step, train
from quantkit.evaluation import of_job, windows
from quantkit.evaluation.whole_model import load_blocks
from quantkit.evaluation.windows import Windows
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.files.reading import DTYPES
from quantkit.models.machine.device import choose_dtype, free_memory
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.job import calibrate, check_run, open_skeleton
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import write_text
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import hold_out

SCHEMA = "quantkit.distill-smaller/2"
BYTES_TRAINED = 16  # bytes per parameter: value, gradient, two moments of AdamW, all float32
LOGITS_IN_MEMORY = 6  # logit tensors in memory in a step: both models', their logarithms, gradients
CHOSEN = frozenset({"ppl", "dppl", "kld", "top1"})  # metrics by which students are judged

Students = list[Checkpoint]  # [untrained, trained]


@dataclass(frozen=True)
class SmallerJob(Job):
    schedule: learner.Schedule
    parameters: int
    memory_bytes: int

    @property
    def shard_bytes(self) -> int:
        """Return the maximum size of a weight file in bytes."""
        return int(self.request.run.max_shard_gb * 1e9)

    def record(self) -> dict:
        return {
            "schema": SCHEMA,
            "teacher": {
                "source": self.source.source,
                "blocks": len(self.teacher.blocks),
                "parameters": self.teacher.parameters,
                "bytes": sum(info.nbytes for info in self.source.infos.values()),
            },
            "student": {
                "output": str(self.staging.output),
                "blocks": self.request.options.blocks,
                "parameters": self.parameters,
            },
            "options": asdict(self.request.options),
            "calibration": self.calibration.record(),
            "schedule": asdict(self.schedule),
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "execution": execution(self.teacher),
        }

    def decisive(self) -> dict:
        return {
            "method": "distill",
            "options": as_read(self.request.options),
            "calibration": self.calibration.record(),
            "schedule": asdict(self.schedule),
            "max_shard_gb": self.request.run.max_shard_gb,
            "execution": execution(self.teacher),
        }

    def make(self, progress: Progress, timings: Timings) -> dict:
        """Make the student. Publish the trained one only if its divergence on held-out text is lower than the
        untrained one's."""
        teacher, staging = self.teacher, self.staging
        text, held_out = hold_out(self.calibration.tokens)
        with timings("load"):
            teacher.load_rest()
        with timings("choose"):
            student, chosen = self._cut(text, progress)
        ids = self.calibration.tokens
        with timings("teach"):
            place = staging.folder / "targets.bin"
            counting = _counting(progress, "running the teacher")
            predicted = learner.gather(teacher, ids, len(held_out), place, counting)
        with timings("train"):
            state, trained = self._train(student, predicted, progress)
        progress.phase("writing the student")
        with timings("write"), staging.assemble() as place:
            cut.rewrite(student, state, place, self.shard_bytes)
        students = [student, self._named(place, "trained")]
        progress.phase("comparing")
        with timings("judge"):
            made = self._judge(students, held_out, progress)
        if made["published"] == "cut":
            staging.wait()
            with staging.assemble() as place:
                shutil.copytree(student.folder, place)
        record = self.record() | made | {"chosen": chosen, "trained": trained}
        record["student"] |= {
            "parameters": trained.pop("parameters"),
            "bytes": sum(info.nbytes for info in student.infos.values()),
        }
        cut.describe(self.source, staging.place, record, self.fingerprint)
        return record

    def _cut(self, text: Tensor, progress: Progress) -> tuple[Checkpoint, dict]:
        """Choose blocks by `text [sequences, tokens]`; return the untrained student and a record of the
        choice. Results of an interrupted run are reused."""
        place, choice = self.staging.folder / "cut", self.staging.folder / "cut.json"
        if place.exists():
            return self._named(place, "as cut"), json.loads(choice.read_text())
        teacher = self.teacher
        judged = text[:: -(-text.numel() // blocks.RANKING_TOKENS)]
        batches = list(judged.split(plan.default_batch_size(text.shape[1])))
        counting = _counting(progress, "leaving out blocks")
        kept, rounds = blocks.choose(teacher, batches, self.request.options.blocks, counting)
        cut.check_shapes(teacher, self.source, kept)
        temporary = place.with_name("cutting")
        shutil.rmtree(temporary, ignore_errors=True)
        progress.phase("cutting blocks")
        cut.write(teacher, self.source, kept, temporary, self.shard_bytes)
        progress.phase("checking the cut")
        expected = blocks.without_others(teacher, batches[0], kept)
        cut.prove(teacher, temporary, batches[0], expected, self.source.source)
        chosen = {
            "blocks": list(kept),
            "rounds": [{str(index): value for index, value in found.items()} for found in rounds],
            "tokens": judged.numel(),
            "lists": cut.per_layer(self.source.text_config),
        }
        write_text(choice, json.dumps(chosen, indent=2))
        os.replace(temporary, place)
        self.staging.write_rest(
            {"blocks": torch.tensor(kept)}
        )  # from here on an error keeps the staging folder
        return self._named(place, "as cut"), chosen

    def _named(self, place: Path, how: str) -> Checkpoint:
        """Open the student in the folder `place`; its source is the name that tables show."""
        opened = open_checkpoint(str(place), trust_remote_code=self.request.trust_remote_code)
        return replace(opened, source=f"{self.staging.output.name} {how}")

    def _train(
        self, student: Checkpoint, predicted: Targets, progress: Progress
    ) -> tuple[dict[str, Tensor], dict]:
        """Train the student; return the best tensors by stored name, in their stored types ({} if training
        diverged), and a record."""
        skeleton = Skeleton(student, torch.float32, self.teacher.device)
        model, names = load_blocks(skeleton), skeleton.names
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names.stored and parameter.is_floating_point())
        every = model.named_parameters(remove_duplicate=False)  # a tied one may be stored twice
        trained = {name: part for name, part in every if part.requires_grad and name in names.stored}

        def stored() -> dict[str, Tensor]:
            found = {}
            for name, parameter in trained.items():
                tensor = parameter.detach().t() if name in names.transposed else parameter.detach()
                dtype = DTYPES[student.infos[names.stored[name]].dtype]
                found[names.stored[name]] = tensor.to("cpu", dtype).contiguous()
            return found

        stored_as = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(self.teacher.dtype, "F32")
        bfloat16 = choose_dtype("auto", stored_as, skeleton.device) == "bfloat16"
        options, seed, schedule = self.request.options, self.request.calibration.seed, self.schedule
        taught = learner.Learner(model, stored, predicted, options, schedule, seed, bfloat16)
        with learner.deterministic(skeleton.device):
            curve = train(
                taught, schedule.steps, schedule.every, math.inf, self.staging, progress, "training"
            )
        step = best_step(curve, math.inf)
        if not step:
            progress.warn("training diverged from the start: try a smaller --lr")
        record = {
            "best": {"kld": curve.get(step), "step": step},
            "curve": [
                {"step": at, "kld": found if math.isfinite(found) else None} for at, found in curve.items()
            ],
            "parameters": skeleton.parameters,
            "tensors": len(trained) if step else 0,
        }
        return best(self.staging) if step else {}, record

    def _judge(self, students: Students, held_out: Tensor, progress: Progress) -> dict:
        """Measure teacher and students on held-out text and the text of --eval; return JSON."""
        models = [replace(self.source, source=self.source.name), *students]

        def measure(text: Windows) -> dict:
            return of_job.compare(models, text, self.teacher.device, progress.evaluating, CHOSEN)

        measured = measure(windows.held_out(self.source, held_out, self.calibration.provenance))
        means = (row["metrics"]["kld"]["mean"] for row in measured["models"][1:])
        before, after = (math.inf if mean is None else mean for mean in means)  # null: not finite
        if not after < before:
            progress.warn(
                f"training did not help: the KL divergence on held-out text is {after:.5f}, as cut "
                f"{before:.5f}; the student is published as it was cut"
            )
        further = measure(self.evaluated) if self.evaluated else None
        return {"published": "trained" if after < before else "cut", "held_out": measured, "eval": further}


def prepare(request: Request, progress: Progress, text: Path | None = None, dry_run: bool = False) -> Job:
    """Open and check the teacher, and plan the job. Raises QuantkitError for invalid input.

    text: file of --eval. A dry run does not check whether the output exists and computes no hashes.
    """
    options = request.options
    options.check()
    check_run(request.run)
    teacher = open_checkpoint(request.teacher, request.revision, request.offline, request.trust_remote_code)
    staging, adopted = stage(request, teacher, "teacher", progress, dry_run)
    skeleton = open_skeleton(teacher, request.run, adopted)
    cut.check_teacher(teacher, skeleton, options.blocks)
    calibrated = calibrate(teacher, request, progress)
    trained, held_out = map(len, hold_out(calibrated.tokens))
    vocabulary, seqlen = teacher.text_config.vocab_size, calibrated.tokens.shape[1]
    schedule = learner.Schedule.of(options, trained, seqlen, vocabulary, request.run.batch_size)
    parameters = cut.parameters(skeleton, range(options.blocks))
    logits = LOGITS_IN_MEMORY * 4 * schedule.together * seqlen * vocabulary
    need = parameters * BYTES_TRAINED + logits
    disk = learner.nbytes(skeleton, (trained + held_out) * seqlen) + parameters * (BYTES_TRAINED + 12)
    remedy = "fewer --blocks or a shorter --seqlen"
    plan.check_memory(need, free_memory(skeleton.device), remedy, skeleton.device)
    job = SmallerJob(
        request, teacher, skeleton, calibrated, staging, evaluated(teacher, text), disk, schedule, parameters,
        need,
    )  # fmt: skip
    return job if dry_run else job.signed(progress)


def _counting(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress.counting(what, done, total)
