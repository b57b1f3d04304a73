"""The loop of training: steps, a measurement on held-out text at every stop, and the best student kept.

A learner knows how a step is made and how far its student then is from the teacher; the loop knows when to
stop, what to keep and how to go on after an interruption. The best student lies in a file, not in memory.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import torch
from torch import Tensor

from quantkit.distillation.descent import Descent
from quantkit.models.files import safetensors_folder
from quantkit.models.files.reading import tensor as load
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import save
from quantkit.quantize.staging.folder import Staging

SAVE_SECONDS = 60.0  # between two states that --resume could go on from; when they are saved changes no byte
SAVE_SHARE = 20  # of a run at most a twentieth goes into saving
BEST = "best.safetensors"

Curve = dict[int, float]  # divergence on held-out text, by the steps before it


class Learner(Protocol):
    """A student in training."""

    descent: Descent

    def step(self, number: int) -> None:
        """Make step `number`, from 0."""

    def divergence(self) -> float:
        """Return the mean KL divergence from the teacher on held-out text, in nats."""

    def stored(self) -> dict[str, Tensor]:
        """Return the trained tensors, as they will be stored."""


def train(
    learner: Learner, steps: int, every: int, begun: float, staging: Staging, progress: Progress, what: str
) -> Curve:
    """Train for `steps` steps. Each `every` of them and at the end the student is measured, and kept where it
    is the best so far and below `begun`. Ends early if the first stop is not better, or training diverged.
    """
    curve: Curve = {}
    state = {name: load(info) for name, info in staging.rest().items()}
    if "done" in state:
        learner.descent.restore(state)
        curve = dict(zip(state["stops"].tolist(), state["divergences"].tolist(), strict=True))
    saved, took = time.monotonic(), 0.0
    while (done := learner.descent.done) < steps and not _is_over(curve, begun):
        progress.counting(_progress(what, curve), done, steps)
        learner.step(done)
        done += 1
        if stops := done % every == 0 or done == steps:
            found, least = learner.divergence(), min([begun, *curve.values()])
            curve[done] = found
            if found < least:
                save(staging.folder / BEST, learner.stored())
        if stops or time.monotonic() - saved > max(SAVE_SECONDS, SAVE_SHARE * took):
            began = time.monotonic()
            looks = torch.tensor(list(curve)), torch.tensor(list(curve.values()), dtype=torch.float64)
            staging.write_rest(learner.descent.state() | {"stops": looks[0].long(), "divergences": looks[1]})
            saved, took = time.monotonic(), time.monotonic() - began
    progress.counting(_progress(what, curve), learner.descent.done, steps)
    return curve


def best_step(curve: Curve, begun: float) -> int:
    """Return the step of the least divergence; 0 if none is below `begun`."""
    return min((step for step in curve if curve[step] < begun), key=curve.get, default=0)


def best(staging: Staging) -> dict[str, Tensor]:
    """Return the stored tensors of the best student."""
    return {name: load(info) for name, info in safetensors_folder.read_header(staging.folder / BEST).items()}


def _is_over(curve: Curve, begun: float) -> bool:
    """Return whether the run has failed: no stop was better than the start, or the loss is not finite."""
    return bool(curve) and (not best_step(curve, begun) or not math.isfinite(list(curve.values())[-1]))


def _progress(what: str, curve: Curve) -> str:
    return f"{what}, held-out KL {list(curve.values())[-1]:.5f}" if curve else what
