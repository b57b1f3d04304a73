"""Writers: linears whose output is added to the hidden states of a block and used nowhere else.

Writers are found by experiments on a few tokens (`Replay`), not from a list of architectures: if all later
modules return zeros, a block returns its inputs plus the outputs of the earlier writers plus the linear's
output, and adds a small change (nudge) of this output. The last projections of attention and MLP are found.
Linears before a norm (OLMo 2, Gemma) or a multiplier (Granite) and those of experts are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.quantize.calibrate.sites import Site

ROUNDINGS = 8  # of the precision that a block computes in, by which sums may differ
Run = Callable[[Tensor], Tensor]  # a block on hidden states `[batch, tokens, hidden]`


class Replay:
    """A block whose modules can be silent or nudged. returned: outputs of modules in a run as they are."""

    def __init__(self, block: nn.Module, run: Run, hidden: Tensor, names: Sequence[str]):
        self._block, self._run, self._hidden = block, run, hidden
        self.returned: dict[str, object] = {}
        with ExitStack() as stack:
            for name in names:
                stack.callback(block.get_submodule(name).register_forward_hook(self._keeping(name)).remove)
            run(hidden)

    def nudged(self, nudge: Tensor, silent: Sequence[str], writer: str) -> Tensor:
        """Return the block's output if `nudge` is added to the output of `writer`. Modules `silent` return
        zeros."""

        def add(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output + nudge.reshape(output.shape) if output.numel() == nudge.numel() else output

        with ExitStack() as stack:
            for name in silent:
                module = self._block.get_submodule(name)
                module.forward = partial(self._zeros, name)
                stack.callback(delattr, module, "forward")
            stack.callback(self._block.get_submodule(writer).register_forward_hook(add).remove)
            return self._run(self._hidden)

    def _keeping(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self.returned[name] = _copied(output)

        return hook

    def _zeros(self, name: str, *args: object, **kwargs: object) -> object:
        output = _copied(self.returned[name])
        states = output[0] if isinstance(output, tuple) and output else output
        if isinstance(states, Tensor):
            states.zero_()
        return output


def find_writers(block: nn.Module, sites: Sequence[Site], run: Run, hidden: Tensor) -> list[str]:
    """Return the names of writers in the order of calls; calls `run` a few times."""
    candidates = [
        name
        for site in sites
        if site.calls == 1 and not site.pool
        for name in site.linears
        if block.get_submodule(name).out_features == hidden.shape[-1]
    ]
    children = [name for name, child in block.named_children() if not isinstance(child, nn.Dropout)]
    replay = Replay(block, run, hidden, [*children, *candidates])
    order = [name for name in replay.returned if name in children]
    nudge = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    nudge *= hidden.float().square().mean().sqrt().to(nudge)
    found: list[str] = []
    for name in candidates:
        if replay.returned[name].numel() != hidden.numel():
            continue
        own = name.partition(".")[0]
        after = order[order.index(own) + 1 :] if own in order else []
        outcome = replay.nudged(nudge, after, name)
        written = [replay.returned[writer].reshape(hidden.shape) for writer in (*found, name)]
        if outcome.shape == hidden.shape and _equal(outcome, sum(written, hidden) + nudge):
            found.append(name)
    return found


def _copied(output: object) -> object:
    """Return a copy of a module's output."""
    return tree_map_only(Tensor, torch.clone, output)


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal up to a few rounding errors."""
    tolerance = ROUNDINGS * torch.finfo(found.dtype).eps * expected.abs().amax()
    return bool(((found - expected).abs() <= tolerance).all())
