"""Edits of parameters that rotate the stream or heads, for a block in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.quantize.transforms.probe import Probe, assign
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal
from quantkit.quantize.transforms.rotation.stream import Heads, Stream

TURNED = 1 << 22  # weights that are turned together
Get = Callable[[str], Tensor]  # a parameter's values before, float32


@dataclass(frozen=True)
class Turn:
    """A rotation of channels along an axis by `by`. axis: negative, counted from the end. channels:
    `[groups, width]`, the channels of each group; None: consecutive groups of `by.width`."""

    axis: int
    by: Orthogonal
    channels: Tensor | None = None

    def apply(self, tensor: Tensor) -> None:
        """Rotate a float32 tensor in place, TURNED weights at a time."""
        rows = tensor.movedim(self.axis, -1)
        step = max(1, TURNED // rows.shape[-1])
        for part in rows.split(step) if rows.ndim > 1 else [rows]:
            if self.channels is None:
                part.copy_(self.by.turn(part.unflatten(-1, (-1, self.by.width))).flatten(-2))
            else:
                channels = self.channels.to(part.device)
                part[..., channels] = self.by.turn(part[..., channels])


@dataclass
class Edit:
    """New values of one parameter. gain: the norm whose weight is multiplied into its columns, and whether
    that weight acts as 1 + w. turns: rotations after that. fill: one number for all values instead."""

    turns: list[Turn] = field(default_factory=list)
    gain: tuple[str, bool] | None = None
    fill: float | None = None

    @property
    def by_rows(self) -> bool:
        """Return whether the edit treats each row alone."""
        return all(turn.axis == -1 for turn in self.turns)

    def of(self, tensor: Tensor, get: Get, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the parameter's new values in `dtype`; products are float32. If the edit treats each row
        alone, as for an embedding, only some rows are in float32 at a time."""
        if self.fill is not None:
            return torch.full_like(tensor, self.fill, dtype=dtype)
        gain = None
        if self.gain:
            norm, one_plus = self.gain
            gain = (get(f"{norm}.weight").float() + one_plus).to(tensor.device)
        rows = max(1, TURNED // tensor.shape[-1]) if self.by_rows and tensor.ndim == 2 else len(tensor)
        found = torch.empty_like(tensor, dtype=dtype)
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows].to(torch.float32, copy=True)
            part = part if gain is None else part.mul_(gain)
            for turn in self.turns:
                turn.apply(part)
            found[start : start + rows] = part
        return found


def of_norm(edits: dict[str, Edit], name: str, one_plus: bool) -> None:
    """Edit a norm whose weight was multiplied into its readers."""
    edits[f"{name}.weight"] = Edit(fill=0.0 if one_plus else 1.0)


def of_stream(
    edits: dict[str, Edit], stream: Stream, shapes: Mapping[str, tuple[int, ...]], by: Orthogonal
) -> None:
    """Add the edits that rotate a block's stream. shapes: of its parameters, by name."""
    for name, one_plus in stream.norms.items():
        of_norm(edits, name, one_plus)
    for name, norm in stream.reads.items():
        edit = edits.setdefault(name, Edit())
        edit.gain = norm, stream.norms[norm]
        edit.turns.append(Turn(-1, by))
    for name in stream.writes:
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in shapes:
                edits.setdefault(part, Edit()).turns.append(Turn(-len(shapes[part]), by))


def of_heads(
    edits: dict[str, Edit], heads: Heads, shapes: Mapping[str, tuple[int, ...]], by: Orthogonal
) -> None:
    """Add the edits that rotate a block's heads."""
    weight, bias = f"{heads.values}.weight", f"{heads.values}.bias"
    edits.setdefault(weight, Edit()).turns.append(Turn(-2, by, heads.rows))
    if bias in shapes:
        edits.setdefault(bias, Edit()).turns.append(Turn(-1, by, heads.rows))
    for name in heads.reads:
        edits.setdefault(name, Edit()).turns.append(Turn(-1, by))


EQUAL = 1e-4  # relative to a block's sum for a token, in float32; wrong rotations are off by 0.1 and more


def turned_stream(
    probe: Probe, edits: Mapping[str, Edit], run: Callable[[Tensor], Tensor], hidden: Tensor, by: Orthogonal
) -> bool:
    """Return whether the edited block computes `f(hidden Q) = f(hidden) Q`, with f the block before."""
    expected = by.turn(run(hidden) - hidden)
    with probe.restored():
        _apply(probe, edits)
        turned = by.turn(hidden)
        return _equal(run(turned) - turned, expected)


def turned_heads(probe: Probe, edits: Mapping[str, Edit], reads: Sequence[str]) -> bool:
    """Return whether the readers of heads, and the block, return the same with edited parameters."""
    before = _returned(probe, reads)
    with probe.restored():
        _apply(probe, edits)
        after = _returned(probe, reads)
    return len(before) == len(after) and all(map(_equal, after, before))


def _apply(probe: Probe, edits: Mapping[str, Edit]) -> None:
    """Edit a block's parameters; for experts, those of their stand-in."""
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


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).norm(dim=-1) <= EQUAL * b.norm(dim=-1)).all())


def difference(found: Tensor, exact: Tensor) -> float:
    """Return `|found - exact| / |exact|`; infinity if any value of `found` is not finite."""
    return ((found - exact).norm() / exact.norm()).item() if torch.isfinite(found).all() else float("inf")
