"""Streaming: the experts of a block are read when they are called, and released for others.

A mixture's block is loaded without its experts. Each expert's linear (`ExpertLinear`) asks the block's
`Keeper` for its values. The keeper reads them from the block's checkpoint or, if they were changed, from
where the change is kept. It holds at most as many weights as two experts have, and releases the least
recently used. So a block takes the same memory for any number of experts. Forward passes of several batches
wait for each other before an expert is read (`Keeper.in_step`), so that it is read once for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import greenlet
import torch
from torch import Tensor, nn

from quantkit.models.machine import expert_share
from quantkit.models.machine.device import free_memory, is_accelerator
from quantkit.models.machine.memory import return_freed_pages
from quantkit.models.skeleton.loading import Loader, give_up

T = TypeVar("T")


class ExpertLinear(nn.Linear):
    """A linear of an expert. keeper: provides its values; None if they are in memory."""

    keeper: Keeper | None = None

    def reset_parameters(self) -> None:
        """Do nothing: values come from the checkpoint, and initialization is slow."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs for `hidden [tokens, in]`. Without tokens, the weights are not read."""
        if self.keeper is None:
            return super().forward(hidden)
        self.keeper.wait(self)
        if not hidden.numel():
            return hidden.new_empty(*hidden.shape[:-1], self.out_features)
        module = self.keeper.provide(self)
        return super().forward(hidden) if module is self else module(hidden)


def streamed(block: nn.Module) -> dict[str, ExpertLinear]:
    """Return the linears of a block that can be streamed, by their names in the block."""
    return {name: module for name, module in block.named_modules() if isinstance(module, ExpertLinear)}


def pays(blocks: Sequence[nn.Module], element: int, device: torch.device) -> bool:
    """Return whether to stream the experts of these blocks; see `expert_share.streams`."""
    weights = (sum(linear.weight.numel() for linear in streamed(block).values()) for block in blocks)
    nbytes, free = max(weights, default=0) * element, None
    if nbytes and is_accelerator(device):
        free = free_memory(device)
    return expert_share.streams(nbytes, free)


class Keeper:
    """Provides the experts' linears of a loaded block; packed ones decoded if `decoded`."""

    def __init__(self, index: int, block: nn.Module, loader: Loader, decoded: bool):
        self._index, self._block, self._loader, self._decoded = index, block, loader, decoded
        linears = streamed(block)
        self._names = {module: local for local, module in linears.items()}
        shapes = [(local, module.out_features, module.in_features) for local, module in linears.items()]
        self.capacity = expert_share.IN_MEMORY * expert_share.largest_expert(shapes)  # weights
        self._loaded: OrderedDict[str, ExpertLinear] = OrderedDict()  # in order of last use
        self._given_up = 0  # bytes released since the last heap trim
        self._installed: dict[str, Callable[[], object]] = {}  # by `keep`
        self._changed: dict[str, Callable[[], Tensor]] = {}  # replace other stored parameters
        self._lent: list[str] = []
        self._pause: Callable[[], object] | None = None
        for module in self._names:
            module.keeper = self

    @property
    def weights(self) -> int:
        """Return the number of weights in memory."""
        return sum(module.weight.numel() for module in self._loaded.values())

    def provide(self, linear: ExpertLinear) -> nn.Module:
        """Return the module that computes for `linear`, itself or a replacement, with values in memory."""
        local = self._names[linear]
        if local not in self._loaded:
            while self._loaded and self.weights + linear.weight.numel() > self.capacity:
                self._give_up(next(iter(self._loaded)))
            self._read(local)
            self._loaded[local] = linear
        self._loaded.move_to_end(local)
        return self._block.get_submodule(local)

    def _read(self, local: str) -> None:
        kept = self._installed.get(local)
        names = [
            f"{local}.{name}" for name, _ in self._block.get_submodule(local).named_parameters()
            if not (kept and name == "weight")
        ]  # fmt: skip
        fetched = self._loader.block(self._index, self._block, self._decoded, names)
        for name in self._changed.keys() & names:
            fetched.tensors[name] = self._changed[name]().to(self._loader.dtype)
        self._loader.load(self._block, fetched)
        if kept:
            kept()

    def _give_up(self, local: str) -> None:
        self._given_up += self._loaded.pop(local).weight.nbytes
        give_up(self._block, local)
        if self._given_up > expert_share.EXPERT_HOLES:
            self._given_up = 0
            return_freed_pages()

    def keep(self, local: str, install: Callable[[], object]) -> None:
        """Call `install` whenever linear `local` is needed, instead of reading its stored weight."""
        self._installed[local] = install

    def keep_changed(self, name: str, again: Callable[[], Tensor]) -> None:
        """Replace a parameter of a linear: from now on `again` returns its values."""
        self._changed[name] = again

    def lend(self, linears: Sequence[str]) -> None:
        """Load these linears, and no others, as ordinary modules that stay in memory until `take_back`."""
        self.take_back()
        for local in linears:
            self._read(local)
            self._lent.append(local)
            self._block.get_submodule(local).keeper = None

    def take_back(self) -> None:
        """Release all linears, lent or not."""
        for local in list(self._loaded):
            self._give_up(local)
        for local in self._lent:
            give_up(self._block, local)
            self._block.get_submodule(local).keeper = self
        self._lent = []

    def wait(self, linear: ExpertLinear) -> None:
        """Wait until all interleaved forward passes have reached this linear, unless it is in memory."""
        if self._pause and self._names[linear] not in self._loaded:
            self._pause()

    def in_step(self, run: Callable[[int], T], count: int) -> Iterator[T]:
        """Yield `run(k)` for k below `count`. Several calls run interleaved, each in its own greenlet up to
        the next expert that is not in memory. When all have reached it, the first reads it. Modules see their
        inputs in the order of k."""
        for start in range(0, count, expert_share.IN_STEP):
            yield from self._together(run, range(start, min(start + expert_share.IN_STEP, count)))

    def _together(self, run: Callable[[int], T], numbers: Sequence[int]) -> list[T]:
        flights = {number: greenlet.greenlet(run) for number in numbers}
        results: dict[int, T] = {}
        self._pause = greenlet.getcurrent().switch
        try:
            with torch.no_grad():
                for number, flight in flights.items():
                    results[number] = flight.switch(number)
                while waiting := [(n, flight) for n, flight in flights.items() if not flight.dead]:
                    for number, flight in waiting:
                        results[number] = flight.switch()
        finally:
            self._pause = None
            with torch.no_grad():
                for flight in flights.values():
                    flight.throw()  # after an error, frees the memory of suspended calls
        return [results[number] for number in numbers]

    def close(self) -> None:
        """Release everything; the linears then have no values."""
        self.take_back()
        for module in self._names:
            module.keeper = None
        return_freed_pages()
