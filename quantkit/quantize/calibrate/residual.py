"""Which linears of a block write to its hidden states: their output is added to these, and that is all.

Where that is so is not listed by architecture but tried, on a few tokens: with all that follows silenced,
what a block returns is what has come in, plus what the writers before have added, plus whatever the linear is
made to say. Attention's and the MLP's last projections are found; those before a norm (OLMo 2, Gemma), before
a multiplier (Granite), or of routed experts are rightly not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from quantkit.quantize.calibrate.sites import Site

ROUNDINGS = 8  # of the precision that a block computes in, by which sums may differ


def find_writers(
    block: nn.Module, sites: Sequence[Site], run: Callable[[], Tensor], entering: Tensor
) -> list[str]:
    """Names of these linears, in the order of calls, from a few calls of `run`, which lets the hidden states
    `entering` through the block."""
    candidates = [
        name
        for site in sites
        if site.calls == 1 and not site.pool
        for name in site.linears
        if block.get_submodule(name).out_features == entering.shape[-1]
    ]
    children = _left(block, run)
    said = torch.randn(entering.shape, generator=torch.Generator().manual_seed(0)).to(entering)
    said *= entering.float().square().mean().sqrt().to(said)
    found: list[str] = []
    for name in candidates:
        order = list(children)
        own = name.partition(".")[0]
        after = order[order.index(own) + 1 :] if own in children else []
        silent = {child: children[child] for child in after}
        before: dict[str, Tensor] = {}
        rest = _with(block, run, name, torch.zeros_like(said), silent, found, before)
        outcome = _with(block, run, name, said, silent, found, before)
        if rest.shape == entering.shape and _equal(rest, sum(before.values(), entering)):
            if _equal(outcome, rest + said):
                found.append(name)
    return found


def _left(block: nn.Module, run: Callable[[], Tensor]) -> dict[str, object]:
    """What each child of the block returns, silenced, in the order of calls. Dropout lets writers pass."""
    left: dict[str, object] = {}
    with ExitStack() as stack:
        for name, child in block.named_children():
            if isinstance(child, nn.Dropout):
                continue

            def keep(module: nn.Module, args: tuple, output: object, name: str = name) -> None:
                left.setdefault(name, _silenced(output))

            stack.callback(child.register_forward_hook(keep).remove)
        run()
    return left


def _silenced(output: object) -> object:
    """A module's output with nothing in its hidden states."""
    if isinstance(output, Tensor):
        return torch.zeros_like(output)
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return (torch.zeros_like(output[0]), *output[1:])
    return output


def _with(
    block: nn.Module,
    run: Callable[[], Tensor],
    name: str,
    said: Tensor,
    silent: dict[str, object],
    writers: Sequence[str],
    before: dict[str, Tensor],
) -> Tensor:
    """What the block returns where linear `name` says `said` and children after it are silent; what `writers`
    say goes to `before`."""

    def keep(writer: str) -> Callable:
        return lambda module, args, output: before.update({writer: output.clone()})

    with ExitStack() as stack:
        for child, output in silent.items():
            module = block.get_submodule(child)
            module.forward = lambda *args, output=output, **kwargs: _silenced(output)
            stack.callback(delattr, module, "forward")
        for writer in writers:
            stack.callback(block.get_submodule(writer).register_forward_hook(keep(writer)).remove)
        hook = block.get_submodule(name).register_forward_hook(lambda module, args, output: said.clone())
        stack.callback(hook.remove)
        return run()


def _equal(found: Tensor, expected: Tensor) -> bool:
    """But for roundings."""
    tolerance = ROUNDINGS * torch.finfo(found.dtype).eps * expected.abs().amax()
    return bool(((found - expected).abs() <= tolerance).all())
