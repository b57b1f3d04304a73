"""Gradient descent by Adam (Kingma and Ba 2015, arXiv:1412.6980), whose state can be stored and restored.

The rate rises and then follows half a cosine to 0 (Loshchilov and Hutter 2017, arXiv:1608.03983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

BETAS = 0.9, 0.99
WARM_UP = 8  # steps
EMPTY = 0.01  # size of a tensor of zeros, such as a bias that was never needed


class Descent:
    """Steps of `adam` on `parameters`, by name. rate: the learning rate, by the steps that were made."""

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
        """Return all tensors that the following steps depend on, on the host."""
        found = {f"parameter.{name}": part.detach() for name, part in self._parameters.items()}
        for number, moments in self._adam.state_dict()["state"].items():
            found |= {f"moment.{number}.{key}": value for key, value in moments.items()}
        found["done"] = torch.tensor(self.done)
        return {name: part.cpu().contiguous() for name, part in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`."""
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

    A scale of 1e-4 and a norm's weight of 3 take the same steps in relative terms, so one learning rate
    serves scales of all layouts, norms and biases. coded: names of what is measured number by number; the
    others, norms and biases, by the root mean square of their tensor. steps: in all; the rate rises for
    WARM_UP of them.
    """

    def __init__(self, start: Mapping[str, Tensor], coded: set[str], lr: float, steps: int):
        self._start = dict(start)
        self._size = {name: _size(value, name in coded) for name, value in start.items()}
        self._moved = {name: nn.Parameter(torch.zeros_like(value)) for name, value in start.items()}

        def rate(done: int) -> float:
            return lr * min(1.0, (done + 1) / WARM_UP) * (0.5 * (1 + math.cos(math.pi * done / steps)))

        adam = torch.optim.Adam(self._moved.values(), lr=lr, betas=BETAS, foreach=False)
        super().__init__(self._moved, adam, rate)

    def values(self) -> dict[str, Tensor]:
        """Return the current floats; autograd follows."""
        return {name: start + self._size[name] * self._moved[name] for name, start in self._start.items()}


def _size(value: Tensor, coded: bool) -> Tensor:
    """Return the size of a step of 1 for each number of a tensor."""
    if coded:
        return value.abs()
    mean = value.square().mean().sqrt()
    return torch.where(mean > 0, mean, EMPTY).expand_as(value)


def order(count: int, *seeds: int) -> list[int]:
    """Return 0 to `count - 1` in an order that depends on the seeds alone."""
    mixed = reduce(lambda mixed, seed: (mixed * 1_000_003 + seed) % 2**31, seeds, 0)
    generator = torch.Generator().manual_seed(mixed)
    return torch.randperm(count, generator=generator).tolist()
