"""The optimizer of both stages: Adam on changes relative to each float's size.

Adam: Kingma and Ba 2015, arXiv:1412.6980; its state can be stored and restored. The rate rises linearly, then
follows half a cosine to 0 (Loshchilov and Hutter 2017, arXiv:1608.03983).
"""

import math
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn

BETAS = 0.9, 0.99
WARM_UP_STEPS = 8  # steps
EMPTY = 0.01  # size to assume for a tensor of zeros, such as an unused bias


class Shares:
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
        self._adam = torch.optim.Adam(self._moved.values(), lr=lr, betas=BETAS, foreach=False)
        self._lr, self._steps, self.done = lr, steps, 0

    def values(self) -> dict[str, Tensor]:
        """Return the current floats by name; autograd can follow."""
        return {name: start + self._size[name] * self._moved[name] for name, start in self._start.items()}

    def step(self) -> None:
        """Make a step along the accumulated gradients and clear them."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.done / self._steps))
        for group in self._adam.param_groups:
            group["lr"] = self._lr * min(1.0, (self.done + 1) / WARM_UP_STEPS) * cosine
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        """Return all tensors on which the following steps depend, on the CPU."""
        tensors = {f"parameter.{name}": moved.detach() for name, moved in self._moved.items()}
        for number, moments in self._adam.state_dict()["state"].items():
            tensors |= {f"moment.{number}.{key}": value for key, value in moments.items()}
        tensors["done"] = torch.tensor(self.done)
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state`."""
        self.done = int(state["done"])
        with torch.no_grad():
            for name, moved in self._moved.items():
                moved.copy_(state[f"parameter.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("moment."):
                _, number, key = name.split(".")
                moments.setdefault(int(number), {})[key] = value
        self._adam.load_state_dict(self._adam.state_dict() | {"state": moments})


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
