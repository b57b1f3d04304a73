"""The loss of a finished output: its KL divergence from the original model on a few tokens kept out of the
calibration.

Errors of single linears are relative to all tokens together, so a massive first token decides them, and they
do not show how errors add up. The KL divergence compares the predictions of the whole model, token by token.
Logits of the original model are kept, so the two models are never in memory together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.layouts import Statistic
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import divergence, walk
from quantkit.quantize.calibrate.importance import of_head
from quantkit.quantize.calibrate.states import HERE
from quantkit.quantize.job import Job
from quantkit.quantize.outputs import Loss
from quantkit.quantize.progress import SILENT
from quantkit.quantize.solvers.rtn import RtnSolver
from quantkit.quantize.solving import round_block
from quantkit.text.calibration import HeldBack

LARGE = 1.0  # nats: above, the output predicts little like the original
NOISE = 0.01  # nats that 16-bit arithmetic alone may cost
REMEDIES = {"target": "own", "transform": "none", "solver": "rtn"}  # options to try if error feedback fails


@dataclass(frozen=True)
class Expected:
    """Predictions of the original model for the tokens that all jobs of a command are measured on. logits: of
    each sequence, `[tokens, vocabulary]` on the host. rtn_kld: see Loss."""

    held_back: HeldBack
    logits: list[Tensor]
    rtn_kld: float | None


def of_original(job: Job, listen: Callable[[int, int], None]) -> Expected:
    """Run the held-back tokens of a job through its source, and next to it through the baseline: the source
    with blocks rounded to nearest, and with the output's embedding and head. Error feedback that loses more
    than the baseline has failed. One block is in memory.

    listen: called with the number of finished blocks and of all."""
    skeleton, tokens = Skeleton(job.checkpoint, job.skeleton.dtype, job.skeleton.device), job.held_back.tokens
    skeleton.streams = job.skeleton.streams
    skeleton.load_rest(away=True)
    hidden, kld = skeleton.embed(tokens), None
    if baseline := _has_baseline(job, skeleton):
        _install_rest(job, skeleton)
        rounded = skeleton.embed(tokens)
    for index, _ in walk.blocks(skeleton):
        listen(index, skeleton.depth)
        hidden = skeleton.run_block(index, hidden)
        if baseline:
            round_block(skeleton, index, job.specs, RtnSolver(), job.method.layout)
            rounded = skeleton.run_block(index, rounded)
    if baseline and _quantizes_rest(job):
        skeleton.load_rest(away=True)
    logits = [skeleton.logits(states).cpu() for states in hidden]
    if baseline:
        _install_rest(job, skeleton)
        kld = _compared(logits, skeleton, rounded)[0].mean().item()
    skeleton.free()
    return Expected(job.held_back, logits, kld if kld is not None and math.isfinite(kld) else None)


def _has_baseline(job: Job, skeleton: Skeleton) -> bool:
    """Return whether a job has error feedback, no stored scales of inputs, no head as a last block, and no
    type that nobody rounds to without importance."""
    if not all(getattr(spec.grid, "unweighted", True) for spec in job.specs):
        return False
    head = any(spec.block >= skeleton.depth for spec in job.specs if not spec.embedding)
    scales = Statistic.PEAK in job.method.layout.needs
    return Statistic.HESSIAN in job.method.needs and not scales and not head


def _quantizes_rest(job: Job) -> bool:
    """Return whether embedding or head are quantized before the first block."""
    return job.method.outside or any(spec.embedding for spec in job.specs)


def _install_rest(job: Job, skeleton: Skeleton) -> None:
    """Install the output's embedding and head, if they are quantized, in another skeleton of the source."""
    if _quantizes_rest(job):
        material = replace(job.material, skeleton=skeleton)
        measure_head = partial(of_head, skeleton, job.batches, HERE)
        job.method.output.install_rest(material, job.method.solver, measure_head, SILENT)


def of_output(expected: Expected, skeleton: Skeleton, hidden: Tensor) -> Loss | None:
    """Return the loss; None if predictions are not finite. skeleton: of the output. hidden: its final states
    of the held-back tokens, `[batch, tokens, hidden]`."""
    kld, same = _compared(expected.logits, skeleton, hidden)
    if not kld.isfinite().all():
        return None
    figures = kld.mean(), kld.std() / len(kld) ** 0.5, same.mean(), expected.rtn_kld
    # rounded, so that the last digits of sums do not change the manifest
    figures = (None if value is None else float(f"{value:.3g}") for value in figures)
    return Loss(*figures, len(same), expected.held_back.text[:200])


def warning(loss: Loss | None, options: Any, dtype: str) -> str | None:
    """Return a warning if a loss is above that of round to nearest, above LARGE, or None because predictions
    are not finite; else None. options: of the method. dtype: in which the models computed."""
    if loss is None:
        return f"the loss is unknown: predictions are not finite in {dtype}; try --dtype float32"
    if loss.rtn_kld is not None and loss.kld > loss.rtn_kld + NOISE:
        typed = vars(options)  # not what a method has once for all
        other = [name for name, value in REMEDIES.items() if typed.get(name, value) != value]
        tries = " or ".join(f"--{name} {REMEDIES[name]}" for name in other) or "another method"
        return (
            f"the output loses more than round to nearest: KL divergence {loss.kld:.3g} against "
            f"{loss.rtn_kld:.3g}; try {tries}, and please report the model"
        )
    if loss.kld > LARGE:
        return (
            f"the output predicts little like the original: KL divergence {loss.kld:.3g}; try more bits, "
            "smaller groups or quantkit auto"
        )
    return None


def _compared(expected: list[Tensor], skeleton: Skeleton, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KL divergence of each token, and 1.0 where both models predict the same token, else 0.0. A
    model may have no positions for more than one sequence at a time."""
    pairs = (
        divergence.of_logits(logits, skeleton.logits(states).cpu())
        for logits, states in zip(expected, hidden, strict=True)
    )
    kld, same = map(torch.cat, zip(*pairs, strict=True))
    return kld, same
