"""Forward passes that return the inputs of every site of a block, after earlier sites were quantized.

There are two ways, with the same results. `SuspendedForward` runs each batch once and suspends it at every
site until the site's weights are final: true-sequential GPTQ takes the time of one forward pass and the
memory of all live activations. `repeated` runs the block again up to each site and keeps the activations of
one batch. Experts of a layer are independent, so `gather_together` measures many of their sites in one pass.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.sites import Site

Run = Callable[[int], Tensor]  # runs the block on batch k
Each = Callable[[Callable[[int], Any], int], Iterator[Any]]  # how `run(0)` to `run(count - 1)` are called


def gather_together(
    block: nn.Module, gathered: Mapping[Site, SiteSums], run: Run, batches: int, each: Each
) -> None:
    """Add the inputs of independent sites, in the order of the block, from one forward pass that ends at the
    last site.

    The sites' own weights are not used, so experts are not even read.
    """
    *_, last = gathered

    def forward(linear: nn.Module, site: Site, hidden: Tensor) -> Tensor:
        if linear is block.get_submodule(site.module):
            gathered[site].add(hidden)
            if site is last:
                raise _Reached(hidden)
        return hidden if not site.linears else hidden.new_zeros(*hidden.shape[:-1], linear.out_features)

    def until(index: int) -> None:
        with suppress(_Reached):
            run(index)

    with ExitStack() as stack:
        for site in gathered:
            for name in site.linears or (site.pool,):
                module = block.get_submodule(name)
                module.forward = partial(forward, module, site)
                stack.callback(delattr, module, "forward")
        for _ in each(until, batches):
            pass


class SuspendedForward:
    """Forward passes of all batches at once, each suspended when it reaches the next site.

    run: runs the block on the batch of a given index. Greenlets switch between the passes inside one thread,
    so that torch's thread pool stays the same.
    """

    def __init__(self, block: nn.Module, sites: Sequence[Site], run: Run, batches: int):
        self._block = block
        self._run = run
        self._main = greenlet.getcurrent()
        self._flights = [greenlet.greenlet(run) for _ in range(batches)]
        self._ahead = list(sites)
        self._suspended = [self._suspend_at(site.module) for site in sites]

    def _suspend_at(self, name: str) -> nn.Module:
        """Make a linear pause with its input. When it resumes, the module then in its place computes."""
        linear = self._block.get_submodule(name)

        def forward(hidden: Tensor) -> Tensor:
            self._main.switch(hidden)
            now = self._block.get_submodule(name)
            return type(linear).forward(linear, hidden) if now is linear else now(hidden)

        linear.forward = forward
        return linear

    def _resume(self, index: int) -> Tensor:
        """Resume pass `index` and return the next input it pauses at, or its output. no_grad is set here and
        restored afterwards, because passes are interleaved."""
        flight = self._flights[index]
        with torch.no_grad():
            return flight.switch() if flight else flight.switch(index)

    def _next(self) -> Iterator[Tensor]:
        """Resume all passes, one after another."""
        return (self._resume(index) for index in range(len(self._flights)))

    def _pass(self, count: int) -> None:
        """Skip the next `count` sites."""
        for _ in range(count):
            deque(self._next(), maxlen=0)
        del self._ahead[:count]

    def inputs(self, site: Site) -> Iterator[Tensor]:
        """Yield the inputs of a site, batch by batch. Sites must come in order; some may be skipped."""
        self._pass(self._ahead.index(site))
        del self._ahead[0]
        return self._next()

    def outputs(self) -> Iterator[Tensor]:
        """Yield the block's outputs, batch by batch. Call it after the last site to be measured."""
        self._pass(len(self._ahead))
        return self._next()

    def close(self) -> None:
        """End all passes, free their activations and restore the linears."""
        for linear in self._suspended:
            del linear.forward
        with torch.no_grad():
            for flight in self._flights:
                flight.throw()


def repeated(
    linear: nn.Module,
    run: Run,
    batches: int,
    each: Each = lambda run, count: map(run, range(count)),
    whole: bool = False,
) -> Iterator[Tensor]:
    """Yield a linear's inputs by batch and call. A forward pass stops there, or, if `whole`, goes on."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, args: tuple) -> None:
        if not whole:
            raise _Reached(args[0])
        seen.append(args[0].clone())  # the forward goes on, and may change it in place

    def reached(index: int) -> Tensor | None:
        try:
            run(index)
        except _Reached as reached:
            return reached.inputs
        return None

    with linear.register_forward_pre_hook(stop):
        for inputs in each(reached, batches):
            if inputs is not None:
                yield inputs
            yield from seen
            seen.clear()


class _Reached(Exception):
    """Raised at a site to end a forward pass; carries the site's inputs."""

    def __init__(self, inputs: Tensor):
        super().__init__()
        self.inputs = inputs
