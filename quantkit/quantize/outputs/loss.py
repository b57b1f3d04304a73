"""The loss of a finished output: its KL divergence from the original model on a few tokens kept out of the
calibration.

Errors of single linears are relative to all tokens together, so a massive first token decides them, and they
do not show how errors add up. The KL divergence compares the predictions of the whole model, token by token.

The original model runs block by block. Meanwhile the same tokens run through a second model, whose blocks are
rounded to nearest: error feedback that loses more than this failed. Logits of the original are kept, so the
two models are never in memory together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.layouts import Statistic
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import divergence, walk
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


def of_original(job: Job) -> Expected:
    """Run the held-back tokens of a job through its source. All but one block is on the meta device."""
    skeleton = Skeleton(job.checkpoint, job.skeleton.dtype, job.skeleton.device)
    skeleton.streams = job.skeleton.streams
    skeleton.load_rest(away=True)
    hidden = skeleton.embed(job.held_back.tokens)
    baseline = _Baseline.of(job, skeleton)
    for index, _ in walk.blocks(skeleton, lambda index: (None, True)):
        hidden = skeleton.run_block(index, hidden)
        if baseline:
            baseline.run(index)
    if baseline and baseline.outside:
        skeleton.load_rest(away=True)
    logits = [skeleton.logits(states).cpu() for states in hidden]
    kld = baseline.loss(logits) if baseline else None
    skeleton.model.to("meta")
    return Expected(job.held_back, logits, kld)


class _Baseline:
    """The original with blocks rounded to nearest, run beside the original on the same skeleton. outside:
    embedding or head are quantized; the baseline has those of the output."""

    def __init__(self, job: Job, skeleton: Skeleton):
        self.job, self.skeleton = job, skeleton
        self.outside = job.method.outside or any(spec.embedding for spec in job.specs)
        self._install()
        self.hidden = skeleton.embed(job.held_back.tokens)

    @staticmethod
    def of(job: Job, skeleton: Skeleton) -> _Baseline | None:
        """Return the baseline of a job with error feedback; None for other jobs, for a layout with stored
        scales of inputs, and if the head is a last block."""
        method = job.method
        head = any(spec.block >= skeleton.depth for spec in job.specs if not spec.embedding)
        fits = Statistic.HESSIAN in method.needs and Statistic.PEAK not in method.layout.needs and not head
        return _Baseline(job, skeleton) if fits else None

    def run(self, index: int) -> None:
        """Round the loaded block and run it."""
        round_block(self.skeleton, index, self.job.specs, RtnSolver(), self.job.method.layout)
        self.hidden = self.skeleton.run_block(index, self.hidden)

    def loss(self, expected: list[Tensor]) -> float | None:
        """Return the KL divergence from the original's logits; None if it is not finite."""
        self._install()
        kld = _compared(expected, self.skeleton, self.hidden)[0].mean().item()
        return kld if math.isfinite(kld) else None

    def _install(self) -> None:
        if self.outside:
            material = replace(self.job.material, skeleton=self.skeleton)
            given = self.job.method.solver, self.job.batches, SILENT, HERE
            self.job.method.output.install_rest(material, *given)


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
        other = [name for name, value in REMEDIES.items() if getattr(options, name) != value]
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
