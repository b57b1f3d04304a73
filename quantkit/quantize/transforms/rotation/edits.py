"""What becomes of each parameter when a stream or heads turn: the same for a block in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.quantize.transforms.probe import Probe, assign
from quantkit.quantize.transforms.rotation.orthogonal import Orthogonal
from quantkit.quantize.transforms.rotation.stream import Heads, Norm, Stream

AT_ONCE = 1 << 22  # weights that are turned together
Get = Callable[[str], Tensor]  # a parameter's values before, float32


@dataclass(frozen=True)
class Turn:
    """Channels along an axis, counted from the end, are multiplied by `by`: those of `channels [groups,
    width]`, or one group of `by.width` after the other."""

    axis: int
    by: Orthogonal
    channels: Tensor | None = None

    def apply(self, tensor: Tensor) -> None:
        """Turn a float32 tensor in place, so many weights at a time."""
        rows = tensor.movedim(self.axis, -1)
        step = max(1, AT_ONCE // rows.shape[-1])
        for part in rows.split(step) if rows.ndim > 1 else [rows]:
            if self.channels is None:
                part.copy_(self.by.turn(part.unflatten(-1, (-1, self.by.width))).flatten(-2))
            else:
                channels = self.channels.to(part.device)
                part[..., channels] = self.by.turn(part[..., channels])


@dataclass
class Edit:
    """Of one parameter. gain: norm whose weight its columns take, and their axis; turns: then. fill: all
    its values are this number instead; over: the norm whose weight it is divided by first."""

    turns: list[Turn] = field(default_factory=list)
    gain: tuple[str, Norm, int] | None = None
    fill: float | None = None
    over: tuple[str, Norm] | None = None

    @property
    def by_rows(self) -> bool:
        """Whether every row becomes what it becomes by itself."""
        return all(turn.axis == -1 for turn in self.turns) and (self.gain is None or self.gain[2] == -1)

    def of(self, tensor: Tensor, get: Get, dtype: torch.dtype = torch.float32) -> Tensor:
        """The parameter's new values, in `dtype`; products are float32. Of one whose rows are turned each by
        itself, such as an embedding, no more than a part is held in float32."""
        if self.fill is not None:
            return torch.full_like(tensor, self.fill, dtype=dtype)
        if self.over:
            tensor = tensor.float() / _acting(*self.over, get).to(tensor.device)
        gain = None
        if self.gain:
            gain = _acting(*self.gain[:2], get).to(tensor.device)
            gain = gain.reshape(-1, *[1] * (-self.gain[2] - 1))
        rows = max(1, AT_ONCE // tensor.shape[-1]) if self.by_rows and tensor.ndim == 2 else len(tensor)
        found = torch.empty_like(tensor, dtype=dtype)
        for start in range(0, len(tensor), rows):
            part = tensor[start : start + rows].to(torch.float32, copy=True)
            part = part if gain is None else part.mul_(gain)
            for turn in self.turns:
                turn.apply(part)
            found[start : start + rows] = part
        return found


def _acting(name: str, norm: Norm, get: Get) -> Tensor:
    """What a norm multiplies by, `[hidden]`."""
    weight = get(f"{name}.weight").float()
    return 1 + weight if norm.one_plus else weight


def of_norm(name: str, norm: Norm, biased: bool, by: Orthogonal) -> dict[str, Edit]:
    """A norm whose weight went into what reads it."""
    found = {f"{name}.weight": Edit(fill=0.0 if norm.one_plus else 1.0)}
    if biased:
        found[f"{name}.bias"] = Edit([Turn(-1, by)], over=(name, norm))
    return found


def of_stream(stream: Stream, shapes: Mapping[str, tuple[int, ...]], by: Orthogonal) -> dict[str, Edit]:
    """Of a block whose stream is turned; shapes: of its parameters, by name."""
    found: dict[str, Edit] = {}
    for name, norm in stream.norms.items():
        found |= of_norm(name, norm, f"{name}.bias" in shapes, by)
    for name, (norm, axis) in stream.reads.items():
        edit = found.setdefault(name, Edit())
        edit.gain = norm, stream.norms[norm], axis
        edit.turns.append(Turn(axis, by))
    for name in stream.writes:
        for part in (f"{name}.weight", f"{name}.bias"):
            if part in shapes:
                found.setdefault(part, Edit()).turns.append(Turn(-len(shapes[part]), by))
    return found


def of_heads(heads: Heads, shapes: Mapping[str, tuple[int, ...]], by: Orthogonal) -> dict[str, Edit]:
    """Of a block whose heads are turned."""
    weight, bias = f"{heads.values}.weight", f"{heads.values}.bias"
    found = {weight: Edit([Turn(-2, by, heads.rows)])}
    if bias in shapes:
        found[bias] = Edit([Turn(-1, by, heads.rows)])
    return found | {name: Edit([Turn(-1, by)]) for name in heads.reads}


def joined(*several: Mapping[str, Edit]) -> dict[str, Edit]:
    """All of them: sides of a matrix turn independently of one another."""
    found: dict[str, Edit] = {}
    for edits in several:
        for name, edit in edits.items():
            known = found.setdefault(name, Edit())
            found[name] = Edit(
                known.turns + edit.turns,
                known.gain or edit.gain,
                edit.fill if known.fill is None else known.fill,
                known.over or edit.over,
            )
    return found


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
