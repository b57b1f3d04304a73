"""A block while a transform is at work on it: in float32, and afterwards as it will be stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantkit.quantize.transforms import BlockView
from quantkit.quantize.transforms.fold import Producer


@contextmanager
def in_float32(view: BlockView, changed: set[str], modules: Sequence[str] = ("",)) -> Iterator[None]:
    """Hold the parameters of the block, or of these modules of it, in float32. Afterwards those that stay in
    16 bit are rounded as they will be stored, if they are `changed`; weights to be quantized wait in float32,
    and leave `changed`."""
    found = {name: view.block.get_submodule(name) for name in modules}
    dtypes = {
        f"{name}.{leaf}" if name else leaf: parameter.dtype
        for name, module in found.items()
        for leaf, parameter in module.named_parameters()
    }
    buffers = [(part, dict(part._buffers)) for module in found.values() for part in module.modules()]
    for module in found.values():
        module.float()
    yield
    for part, before in buffers:  # no transform changes these
        part._buffers.update(before)
    quantized = {f"{name}.weight" for name, grid in view.grids.items() if grid}
    changed -= quantized
    for name in dtypes.keys() - quantized:
        owner, _, leaf = name.rpartition(".")
        module = view.block.get_submodule(owner)
        tensor = getattr(module, leaf).detach()
        tensor = view.stored(name, tensor) if name in changed else tensor
        setattr(module, leaf, nn.Parameter(tensor.to(dtypes[name]), requires_grad=False))


def set_aside(block: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Let linears compute in these dtypes again; weights that this rounds, float32, by name."""
    exact = {}
    for name, dtype in dtypes.items():
        module = block.get_submodule(name)
        if module.weight.dtype != dtype:
            weight = module.weight.detach()
            module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            if not torch.equal(module.weight.float(), weight):
                exact[name] = weight
    return exact


def divided(view: BlockView, producer: Producer, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The scale `[in]` that a producer's 16-bit weights really have when divided by `scale`, and its
    parameters, float32, by their names in the block.

    A norm's weight is rounded first, and the columns then take what is left: `w / w_stored`. Rows of a
    linear have no single factor once rounded; they are quantized, or lose what 16 bit lose.
    """
    weight = view.block.get_submodule(producer.name).weight
    if weight.ndim == 1:
        extra = 1.0 if producer.one_plus else 0.0
        acting = weight.float() + extra
        exact = acting / (view.stored(f"{producer.name}.weight", acting / scale - extra).float() + extra)
        scale = torch.where(torch.isfinite(exact) & (exact > 0), exact, 1.0)
    return scale, producer.divided(view.block, scale)
