"""Whether a block computes the same when its stream or its heads have turned: tried on the block itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from quantkit.quantize.transforms.probe import Probe, assign
from quantkit.quantize.transforms.rotation.edits import Edit
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal

EXACT = 1e-4  # of what a block adds to a token, in float32; what does not turn is off by a tenth and more


def turned_stream(
    probe: Probe, edits: Mapping[str, Edit], run: Callable[[Tensor], Tensor], hidden: Tensor, by: Orthogonal
) -> bool:
    """Whether the block, its parameters edited, makes of `hidden Q` what it made of `hidden`, times Q."""
    wanted = by.turn(run(hidden) - hidden)
    with probe.restored():
        _apply(probe, edits)
        turned = by.turn(hidden)
        return _alike(run(turned) - turned, wanted)


def turned_heads(probe: Probe, edits: Mapping[str, Edit], reads: Sequence[str]) -> bool:
    """Whether what reads heads returns the same with the block's parameters edited, and so the block."""
    before = _returned(probe, reads)
    with probe.restored():
        _apply(probe, edits)
        after = _returned(probe, reads)
    return len(before) == len(after) and all(map(_alike, after, before))


def _apply(probe: Probe, edits: Mapping[str, Edit]) -> None:
    """Edit a block's parameters; of experts, the linear that stands in for them."""
    block = probe.block
    before = {name: parameter for name, parameter in block.named_parameters() if not parameter.is_meta}
    inside = tuple(f"{name}." for name in probe.layers)
    for name, edit in edits.items():
        if not name.startswith(inside):
            assign(block, name, edit.of(before[name], before.__getitem__))
    for name, layer in probe.layers.items():
        stand_in = probe.stand_ins[f"{name}.entering"]
        weight = stand_in.weight
        for linear in (layer.up, layer.down):
            edit = edits.get(f"{name}.0.{linear}.weight")
            weight = weight if edit is None else edit.of(weight, before.__getitem__)
        stand_in.weight = nn.Parameter(weight, requires_grad=False)


def _returned(probe: Probe, names: Sequence[str]) -> list[Tensor]:
    found: list[Tensor] = []
    with ExitStack() as stack:
        for name in names:
            module = probe.block.get_submodule(name.removesuffix(".weight"))
            keep = module.register_forward_hook(lambda module, args, output: found.append(output.float()))
            stack.callback(keep.remove)
        found.append(probe.run().output)
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).norm(dim=-1) <= EXACT * b.norm(dim=-1)).all())


def difference(found: Tensor, wanted: Tensor) -> float:
    """Of logits, relative."""
    return ((found - wanted).norm() / wanted.norm()).item() if torch.isfinite(found).all() else float("inf")
