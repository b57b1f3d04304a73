"""Writers: linears whose output is added to the hidden states of a block and used nowhere else.

Writers are found by experiments on a few tokens (`_nudged`), not from a list of architectures: if all later
modules return zeros, a block returns its inputs plus the outputs of the earlier writers plus the linear's
output, and adds a small change (nudge) of this output. The last projections of attention and MLP are found.
Linears before a norm (OLMo 2, Gemma) or a multiplier (Granite) and those of experts are not.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quantkit.grids.distance import token_distances
from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.calibrate.backward import Run
from quantkit.quantize.calibrate.sites import Site

TOLERANCE = 1e-5  # relative error of a sum of a few terms in float32, per token


def find_writers(
    block: nn.Module, sites: Sequence[Site], run: Callable[..., Tensor], hidden: Tensor
) -> list[str]:
    """Return the names of writers in the order of calls. run: `run(hidden, values=...)` runs the block with
    other values of its parameters and buffers.

    The block runs in float32, and every token is compared and nudged by its own size: in 16 bit, an error of
    the largest token may exceed all of a smaller one. Experts, of which some are not in memory, return their
    inputs: if they returned zeros, a linear whose output is added to theirs would be found.
    """
    candidates = [
        name
        for site in sites
        if site.calls == 1 and not site.pool
        for name in site.linears
        if block.get_submodule(name).out_features == hidden.shape[-1]
    ]
    if not candidates:
        return []
    layers = {name: module for name, module in block.named_modules() if isinstance(module, Experts)}
    inside = tuple(f"{name}." for name in layers)
    tensors = (*block.named_parameters(), *block.named_buffers())
    wide = {name: t.float() for name, t in tensors if t.is_floating_point() and not name.startswith(inside)}
    with torch.no_grad(), ExitStack() as stack:
        for layer in layers.values():
            layer.forward = lambda hidden, *routing: hidden
            stack.callback(delattr, layer, "forward")
        return _proven(block, candidates, partial(run, values=wide), hidden.float())


def _proven(block: nn.Module, candidates: Sequence[str], run: Run, hidden: Tensor) -> list[str]:
    """Return the candidates that add to the hidden states."""
    children = [name for name, child in block.named_children() if not isinstance(child, nn.Dropout)]
    returned: dict[str, object] = {}  # outputs of modules in a run as they are

    def keep(name: str, module: nn.Module, args: tuple, output: object) -> None:
        returned[name] = _copied(output)

    with ExitStack() as hooks:
        for name in (*children, *candidates):
            hooks.enter_context(block.get_submodule(name).register_forward_hook(partial(keep, name)))
        run(hidden)
    order = [name for name in returned if name in children]
    nudge = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    nudge *= hidden.square().mean(-1, keepdim=True).sqrt()
    writers: list[str] = []
    for name in candidates:
        if returned[name].numel() != hidden.numel():
            continue
        child = name.partition(".")[0]
        after = order[order.index(child) + 1 :] if child in order else []
        outcome = _nudged(block, partial(run, hidden), name, nudge, {each: returned[each] for each in after})
        written = [returned[writer].reshape(hidden.shape) for writer in (*writers, name)]
        if outcome.shape == hidden.shape:
            distances = token_distances(outcome, sum(written, hidden) + nudge)
            if (distances <= TOLERANCE).all():
                writers.append(name)
    return writers


def _nudged(
    block: nn.Module, run: Callable[[], Tensor], writer: str, nudge: Tensor, silent: Mapping[str, object]
) -> Tensor:
    """Return the block's output if `writer` returns `nudge` more. silent: outputs of modules to set to 0."""

    def add(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output + nudge.reshape(output.shape) if output.numel() == nudge.numel() else output

    with ExitStack() as stack:
        for name, output in silent.items():
            module = block.get_submodule(name)
            module.forward = partial(_zeros, output)
            stack.callback(delattr, module, "forward")
        stack.enter_context(block.get_submodule(writer).register_forward_hook(add))
        return run()


def _zeros(returned: object, *args: object, **kwargs: object) -> object:
    output = _copied(returned)
    states = output[0] if isinstance(output, tuple) and output else output
    if isinstance(states, Tensor):
        states.zero_()
    return output


def _copied(output: object) -> object:
    return tree_map_only(Tensor, torch.clone, output)
