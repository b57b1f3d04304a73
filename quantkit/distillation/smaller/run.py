"""The way of a student: chosen, cut, proven, trained, judged, published whole or not at all.

Each stage leaves what it made in the staging folder, from which `--resume` goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.distillation.smaller import (
    blocks,
    card,
    channels,
    cut,
    judge,
    shape,
    targets,
    training,
)
from quantkit.distillation.smaller.job import Job
from quantkit.distillation.training import best, best_step, train
from quantkit.evaluation import self_text, windows
from quantkit.evaluation.windows import Windows
from quantkit.models.files import unchanged
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_dtype
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.loading import TORCH_DTYPES
from quantkit.quantize.prepare import plan
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.folder import disk_errors
from quantkit.quantize.timings import Timings
from quantkit.text.calibration import hold_out

Students = list[Checkpoint]  # as cut, and trained


def run(job: Job, progress: Progress) -> dict:
    """The record of what was done.

    Never silently worse: the trained student is published only if its predictions for text that it was not
    trained on are closer to the teacher's than those of the student as it was cut.
    """
    timings, staging = Timings(job.skeleton.device), job.staging
    progress.phase("hashing the teacher")
    fingerprint = job.fingerprint()
    if job.request.resume and not staging.stored_fingerprint():
        progress.warn(f"nothing is staged for {staging.output}: it begins anew")
    with disk_errors(staging.folder, "run the same command with --resume"):
        with staging.opened(fingerprint, job.request.resume):
            students, made = _make(job, progress, timings)
            progress.phase("comparing")
            with timings("judge"):
                record = _judge(job, students, made, progress)
            if record["published"] == "cut":
                staging.wait()
                staging.assemble(lambda place: shutil.copytree(students[0].folder, place))
            unchanged.check(job.checkpoint)
            card.describe(job.checkpoint, staging.place, record, fingerprint)
            staging.publish()
    return record | {"seconds": timings.seconds}


def _make(job: Job, progress: Progress, timings: Timings) -> tuple[Students, dict]:
    """The student as cut and as trained, both in the staging folder, and what is told of the ways there."""
    skeleton, staging = job.skeleton, job.staging
    text, held_out = hold_out(job.calibration.tokens)
    with timings("load"):
        skeleton.load_rest()
    with timings("choose"):
        student, chosen = _cut(job, text, progress)
    if job.options.self_text:
        with timings("write text"):
            text = _self_text(job, progress)
    ids = torch.cat([text, held_out])
    with timings("teach"):
        place = staging.folder / "targets.bin"
        told = targets.gather(skeleton, ids, place, _counting(progress, "asking the teacher"))
    with timings("train"):
        state, trained = _train(job, student, training.Data(ids, told, len(held_out)), progress)
    progress.phase("writing the student")
    with timings("write"):
        place = staging.assemble(lambda place: cut.rewrite(student, state, place, job.shard_bytes))
    return [student, _named(job, place, "trained")], {"chosen": chosen, "trained": trained}


def _cut(job: Job, text: Tensor, progress: Progress) -> tuple[Checkpoint, dict]:
    """The student as cut from `text [sequences, tokens]`, and how its blocks and channels were chosen; where
    that was done before, as it was."""
    place, told = job.staging.folder / "cut", job.staging.folder / "cut.json"
    if place.exists():
        return _named(job, place, "as cut"), json.loads(told.read_text())
    skeleton, seqlen = job.skeleton, text.shape[1]
    judged = text[:: -(-text.numel() // blocks.TOKENS)]
    batches = list(judged.split(plan.default_batch_size(seqlen)))
    kept, rounds = blocks.choose(
        skeleton, batches, len(job.shape.kept), _counting(progress, "leaving out blocks")
    )
    wanted = dataclasses.replace(job.shape, kept=kept)
    axes = shape.laid_beside(skeleton, job.checkpoint, wanted)
    narrowed, expected = channels.narrow(
        skeleton, batches, kept, job.reader, wanted.channels, _counting(progress, "cutting blocks")
    )
    temporary = place.with_name("cutting")
    shutil.rmtree(temporary, ignore_errors=True)
    cut.write(skeleton, job.checkpoint, wanted, axes, narrowed, temporary, job.shard_bytes)
    progress.phase("proving the cut")
    cut.prove(skeleton, temporary, batches[0], expected, job.checkpoint.source)
    chosen = {
        "blocks": list(kept),
        "rounds": [{str(index): value for index, value in found.items()} for found in rounds],
        "tokens": judged.numel(),
        "lists": shape.per_layer(job.checkpoint.text_config),
        "reader": job.reader,
    }
    targets.write_json(told, chosen)
    os.replace(temporary, place)
    job.staging.write_rest({"blocks": torch.tensor(kept)})  # from here on an error leaves what was done
    return _named(job, place, "as cut"), chosen


def _named(job: Job, place: Path, how: str) -> Checkpoint:
    """A student's folder, as the tables call it."""
    opened = open_checkpoint(str(place), trust_remote_code=job.request.trust_remote_code)
    return dataclasses.replace(opened, source=f"{job.staging.output.name} {how}")


def _self_text(job: Job, progress: Progress) -> Tensor:
    """What the teacher writes, int64 `[sequences, tokens]`; what it wrote before the job was interrupted."""
    path = job.staging.folder / "self-text.safetensors"
    if not path.exists():
        samples, seqlen = job.request.calibration.samples, job.calibration.tokens.shape[1]
        skeleton, listen = job.skeleton, _counting(progress, "the teacher writes")
        settings = self_text.Settings(samples, seqlen, job.request.calibration.seed)
        found = self_text.sequences(job.checkpoint, settings, skeleton.dtype, skeleton.device, listen)
        save_file({"ids": torch.cat(list(found))}, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    return load_file(path)["ids"]


def _train(
    job: Job, student: Checkpoint, data: training.Data, progress: Progress
) -> tuple[dict[str, Tensor], dict]:
    """The trained tensors by their stored names, as they are stored, and a record; none where all that was
    tried had diverged."""
    skeleton = Skeleton(student, torch.float32, job.skeleton.device)
    model, names = whole(skeleton), skeleton.names
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names.stored and parameter.is_floating_point())
    every = model.named_parameters(remove_duplicate=False)  # a tied one may be stored twice
    trained = {name: part for name, part in every if part.requires_grad and name in names.stored}

    def stored() -> dict[str, Tensor]:
        found = {}
        for name, parameter in trained.items():
            tensor = parameter.detach().t() if name in names.transposed else parameter.detach()
            dtype = TORCH_DTYPES[student.infos[names.stored[name]].dtype]
            found[names.stored[name]] = tensor.to("cpu", dtype).contiguous()
        return found

    stored_as = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(job.skeleton.dtype, "F32")
    bfloat16 = choose_dtype("auto", stored_as, skeleton.device) == "bfloat16"
    seed, schedule = job.request.calibration.seed, job.schedule
    learner = training.Learner(model, stored, data, job.options, schedule, seed, bfloat16)
    with training.deterministic(skeleton.device):
        curve = train(learner, schedule.steps, schedule.every, math.inf, job.staging, progress, "training")
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
    return best(job.staging) if step else {}, record


def whole(skeleton: Skeleton) -> torch.nn.Module:
    """The skeleton's model with all of its blocks in memory."""
    skeleton.names.check_complete()
    skeleton.load_rest()
    skeleton.streams = False
    container = skeleton.model.get_submodule(skeleton.names.blocks)
    for index in range(len(skeleton.blocks)):
        container[index] = skeleton.load_block(index)
    return skeleton.model


def _judge(job: Job, students: Students, made: dict, progress: Progress) -> dict:
    """The whole record: teacher and students by held-out text and, where one was given, by another."""
    teacher = dataclasses.replace(job.checkpoint, source=job.checkpoint.name)
    _, held = hold_out(job.calibration.tokens)

    def measure(text: Windows) -> tuple[list[float], dict]:
        return judge.measure([teacher, *students], text, job.skeleton.device, listen)

    def listen(source: str, done: int, total: int) -> None:
        progress.counting(f"evaluating {source}", done, total)

    (before, after), measured = measure(windows.held_out(job.checkpoint, held, job.calibration.provenance))
    if not after < before:
        progress.warn(
            f"training did not help: the KL divergence on held-out text is {after:.5f}, as cut {before:.5f}; "
            "the student is published as it was cut"
        )
    record = job.record()
    record["student"] |= {
        "parameters": made["trained"].pop("parameters"),
        "bytes": sum(info.nbytes for info in students[0].infos.values()),
    }
    further = measure(job.evaluated)[1] if job.evaluated else None
    told = {"published": "trained" if after < before else "cut", "held_out": measured, "eval": further}
    return record | made | told


def _counting(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress.counting(what, done, total)
