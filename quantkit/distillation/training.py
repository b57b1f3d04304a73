"""The training loop: gradient descent, regular evaluations on held-out text, and storage of the best student.

A `Learner` makes the steps and measures the student's divergence from the teacher. The loop decides when to
evaluate and to end, and resumes after an interruption. The best student is kept in a file.

The optimizer is Adam (Kingma and Ba 2015, arXiv:1412.6980); its state can be stored and restored. The rate
rises linearly, then follows half a cosine to 0 (Loshchilov and Hutter 2017, arXiv:1608.03983).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from quantkit.models.files import safetensors_folder
from quantkit.models.files.reading import tensor as load
from quantkit.quantize.progress import Progress
from quantkit.quantize.staging.blocks import save
from quantkit.quantize.staging.folder import Staging

BETAS = 0.9, 0.99
WARM_UP_STEPS = 8  # steps
EMPTY = 0.01  # size to assume for a tensor of zeros, such as an unused bias
SAVE_SECONDS = 60.0  # between two saves for --resume, which do not affect the result
SAVE_SHARE = 20  # saving takes at most 1/20 of the time
BEST = "best.safetensors"

Curve = dict[int, float]  # {steps done: divergence on held-out text}


class Learner(Protocol):
    """A student in training."""

    descent: Descent

    def step(self, number: int) -> None:
        """Make step `number`; the first is 0."""

    def divergence(self) -> float:
        """Return the mean KL divergence from the teacher on held-out text, in nats."""

    def stored(self) -> dict[str, Tensor]:
        """Return the trained tensors by name, in the types in which they will be stored."""


def train(
    learner: Learner, steps: int, every: int, begun: float, staging: Staging, progress: Progress, what: str
) -> Curve:
    """Train for `steps` steps; return {step: divergence}. Every `every` steps and at the end, evaluate the
    student; store it if it is the best so far and below `begun`, the divergence at the start. End early if no
    evaluation was below `begun`, or if the loss is not finite. what: name of the stage for progress.
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
    """Return the step with the lowest divergence; 0 if none is below `begun`."""
    return min((step for step in curve if curve[step] < begun), key=curve.get, default=0)


def best(staging: Staging) -> dict[str, Tensor]:
    """Return the tensors of the best student, which `train` stored."""
    return {name: load(info) for name, info in safetensors_folder.read_header(staging.folder / BEST).items()}


def _is_over(curve: Curve, begun: float) -> bool:
    """Return whether training has failed: no evaluation below `begun`, or the last one not finite."""
    return bool(curve) and (not best_step(curve, begun) or not math.isfinite(list(curve.values())[-1]))


def _progress(what: str, curve: Curve) -> str:
    return f"{what}, held-out KL {list(curve.values())[-1]:.5f}" if curve else what


class Descent:
    """Makes steps of `adam` on `parameters`. rate: learning rate as a function of the steps done."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], adam: torch.optim.Optimizer, rate: Callable[[int], float]
    ):
        self._parameters, self._adam, self._rate, self.done = parameters, adam, rate, 0

    def step(self) -> None:
        """Make a step along the accumulated gradients and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate(self.done)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        """Return all tensors on which the following steps depend, on the CPU."""
        found = {f"parameter.{name}": part.detach() for name, part in self._parameters.items()}
        for number, moments in self._adam.state_dict()["state"].items():
            found |= {f"moment.{number}.{key}": value for key, value in moments.items()}
        found["done"] = torch.tensor(self.done)
        return {name: part.cpu().contiguous() for name, part in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state`."""
        self.done = int(state["done"])
        with torch.no_grad():
            for name, part in self._parameters.items():
                part.copy_(state[f"parameter.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("moment."):
                _, number, key = name.split(".")
                moments.setdefault(int(number), {})[key] = value
        self._adam.load_state_dict(self._adam.state_dict() | {"state": moments})


class Shares(Descent):
    """Descent on floats of very different sizes: Adam on each float's change relative to its size.

    A scale of 1e-4 and a norm's weight of 3 take equal relative steps, so one learning rate fits all floats.
    start: initial floats by name. coded: names whose numbers are each relative to their own size; others
    (norms, biases) are relative to their tensor's root mean square. steps: in total; the rate rises for
    WARM_UP_STEPS of them.
    """

    def __init__(self, start: Mapping[str, Tensor], coded: set[str], lr: float, steps: int):
        self._start = dict(start)
        self._size = {name: _size(value, name in coded) for name, value in start.items()}
        self._moved = {name: nn.Parameter(torch.zeros_like(value)) for name, value in start.items()}

        def rate(done: int) -> float:
            return lr * min(1.0, (done + 1) / WARM_UP_STEPS) * (0.5 * (1 + math.cos(math.pi * done / steps)))

        adam = torch.optim.Adam(self._moved.values(), lr=lr, betas=BETAS, foreach=False)
        super().__init__(self._moved, adam, rate)

    def values(self) -> dict[str, Tensor]:
        """Return the current floats by name; autograd can follow."""
        return {name: start + self._size[name] * self._moved[name] for name, start in self._start.items()}


def _size(value: Tensor, coded: bool) -> Tensor:
    """Return, for each number of a tensor, the size that relative changes refer to."""
    if coded:
        return value.abs()
    mean = value.square().mean().sqrt()
    return torch.where(mean > 0, mean, EMPTY).expand_as(value)


def order(count: int, *seeds: int) -> list[int]:
    """Return the numbers 0 to `count - 1` in a random order that depends only on the seeds."""
    mixed = reduce(lambda mixed, seed: (mixed * 1_000_003 + seed) % 2**31, seeds, 0)
    generator = torch.Generator().manual_seed(mixed)
    return torch.randperm(count, generator=generator).tolist()
