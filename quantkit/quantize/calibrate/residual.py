"""Who writes to the hidden states of a block: whose output is added to these, and that is all.

Where that is so is not listed by architecture but tried, on a few tokens (`Held`): with all that follows
silenced, a block returns what has come in, plus what the writers before have added, plus what the linear says
and a nudge of that. Attention's and the MLP's last projections are found; those before a norm (OLMo 2,
Gemma), before a multiplier (Granite), or of routed experts are rightly not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.quantize.calibrate.sites import Site

ROUNDINGS = 8  # of the precision that a block computes in, by which sums may differ
Run = Callable[[Tensor], Tensor]  # a block on hidden states `[batch, tokens, hidden]`


class Held:
    """A block, and modules of it that can be made to return what they `returned` in the first run. entered:
    what they were given in the last run, and in the `first`."""

    def __init__(self, block: nn.Module, run: Run, hidden: Tensor, names: Sequence[str]):
        self._block, self._run, self._hidden = block, run, hidden
        self.returned: dict[str, object] = {}
        self.entered: dict[str, Tensor | None] = {}
        with ExitStack() as stack:
            for name in names:
                stack.callback(block.get_submodule(name).register_forward_hook(self._keeping(name)).remove)
            self.before = run(hidden)
        self.first = dict(self.entered)

    def nudged(
        self, nudge: Tensor, held: Sequence[str], writer: str | None = None, silent: bool = False
    ) -> Tensor:
        """The block's output where what `writer` returns, or what enters the block, changes by `nudge`, and
        modules `held` return what they did, or, `silent`, nothing in their hidden states."""

        def add(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output + nudge.reshape(output.shape) if output.numel() == nudge.numel() else output

        with ExitStack() as stack:
            for name in held:
                module = self._block.get_submodule(name)
                module.forward = self._returning(name, silent)
                stack.callback(delattr, module, "forward")
            if writer is not None:
                stack.callback(self._block.get_submodule(writer).register_forward_hook(add).remove)
            return self._run(self._hidden if writer else self._hidden + nudge)

    def _keeping(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self.entered[name] = args[0] if args else None
            self.returned.setdefault(name, _copied(output))

        return hook

    def _returning(self, name: str, silent: bool) -> Callable:
        def forward(*args: object, **kwargs: object) -> object:
            self.entered[name] = args[0] if args else None
            output = _copied(self.returned[name])
            states = output[0] if isinstance(output, tuple) and output else output
            if silent and isinstance(states, Tensor):
                states.zero_()
            return output

        return forward


def find_writers(block: nn.Module, sites: Sequence[Site], run: Run, hidden: Tensor) -> list[str]:
    """Names of linears that write to the hidden states, in the order of calls, from a few calls of `run`."""
    candidates = [
        name
        for site in sites
        if site.calls == 1 and not site.pool
        for name in site.linears
        if block.get_submodule(name).out_features == hidden.shape[-1]
    ]
    children = [name for name, child in block.named_children() if not isinstance(child, nn.Dropout)]
    held = Held(block, run, hidden, [*children, *candidates])
    order = [name for name in held.returned if name in children]
    nudge = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    nudge *= hidden.float().square().mean().sqrt().to(nudge)
    found: list[str] = []
    for name in candidates:
        if held.returned[name].numel() != hidden.numel():
            continue
        own = name.partition(".")[0]
        after = order[order.index(own) + 1 :] if own in order else []
        outcome = held.nudged(nudge, after, name, silent=True)
        said = [held.returned[writer].reshape(hidden.shape) for writer in (*found, name)]
        if outcome.shape == hidden.shape and _equal(outcome, sum(said, hidden) + nudge):
            found.append(name)
    return found


def _copied(output: object) -> object:
    """A module's output that may be changed in place."""
    return tree_map_only(Tensor, torch.clone, output)


def _equal(found: Tensor, expected: Tensor) -> bool:
    """But for roundings."""
    tolerance = ROUNDINGS * torch.finfo(found.dtype).eps * expected.abs().amax()
    return bool(((found - expected).abs() <= tolerance).all())
