"""R1: who reads the residual stream of a block, and who writes into it. Found by trying, not listed.

If every vector of the stream is multiplied by an orthogonal Q, nothing changes, provided that whatever
reads it is a norm whose weight g can move into the linears behind it (these become `W diag(g) Q`), and
whatever writes into it is a linear (which becomes `Qᵀ W`) (SliceGPT, arXiv:2401.15024, section 3.1; QuaRot,
arXiv:2404.00456, section 4). A norm's bias b becomes `(b / g) Q`.

The folds of AWQ's scales say which norms there are and who reads them. With the outputs of these norms held
fast, a block does nothing but add: a nudge of its inputs comes out as it is, and so does, times a number a
token, a nudge of what a writer writes. What comes out otherwise is no stream that turns.

R2: heads whose values may be turned (SpinQuant, arXiv:2405.16406, section 3.2). Attention takes averages of
values: if the rows of v that make a head's values are multiplied by Rᵀ, its outputs are, and the columns of o
that read them take R. Query heads of a group share their values' rows. Which rows of which linear those are
is known from AWQ's folds; whether nothing between them looks at single channels (as a gate does) is seen when
the block is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from quantkit.quantize.calibrate.residual import Held, Run
from quantkit.quantize.transforms.fold import Fold
from quantkit.quantize.transforms.probe import Probe

STRAIGHT = 1e-3  # part of a nudge that may come out in another direction: rounding of large states


class Untouchable(Exception):
    """Why a rotation is not possible here, in words for the user."""


@dataclass(frozen=True)
class Norm:
    """one_plus: its weight acts as 1 + w. means: it subtracts the mean of its inputs."""

    one_plus: bool
    means: bool


@dataclass(frozen=True)
class Stream:
    """norms: that read it, by name in the block. reads: parameters behind them -> norm and axis of the
    channels. writes: linears that write into it."""

    norms: Mapping[str, Norm]
    reads: Mapping[str, tuple[str, int]]
    writes: Sequence[str]


def find(probe: Probe, folds: Sequence[Fold], run: Run, hidden: Tensor) -> Stream:
    """The stream of a block in float32 that makes `run(hidden)` of its inputs.

    Raises Untouchable where something else than norms reads it, or than linears writes into it.
    """
    block, width = probe.block, hidden.shape[-1]
    found = {
        fold.producer.name: fold
        for fold in folds
        if block.get_submodule(fold.producer.name).weight.shape == (width,)
    }
    generator = torch.Generator().manual_seed(0)
    nudge = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    nudge = nudge * hidden.norm(dim=-1, keepdim=True) / nudge.norm(dim=-1, keepdim=True)
    held = Held(block, run, hidden, list(found))

    def passes(writer: str | None = None) -> bool:
        after = held.nudged(nudge, list(found), writer)
        return _goes_through(after.float() - held.before.float(), nudge)

    if not passes():
        raise Untouchable("something else than norms and what they feed reads the hidden states")
    moved = {name: held.entered[name] - held.first[name] for name in found}
    norms = [name for name in found if _goes_through(moved[name], nudge)]
    if not norms:
        raise Untouchable("no norm reads the hidden states")
    writes = [
        linear for name, linears in _writers(probe, width).items() if passes(name) for linear in linears
    ]
    reads = {column: (name, axis) for name in norms for column, axis in found[name].columns.items()}
    described = {
        name: Norm(found[name].producer.one_plus, subtracts_mean(block.get_submodule(name), width))
        for name in norms
    }
    return Stream(described, reads, writes)


def subtracts_mean(norm: nn.Module, width: int) -> bool:
    """Whether a norm makes the same of its inputs and of these plus a number."""
    weight = norm.weight
    rows = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    with torch.no_grad():
        return bool(torch.allclose(norm(rows), norm(rows + 1), atol=1e-3))


def _writers(probe: Probe, width: int) -> dict[str, list[str]]:
    """What may write: linears as wide as the stream, and layers of experts, with the linears of each."""
    found = {
        name: [name]
        for name, module in probe.modules().items()
        if isinstance(module, nn.Linear) and module.out_features == width
    }
    for name, layer in probe.layers.items():
        if not layer.form.normed:
            found[name] = [f"{name}.{expert}.{layer.down}" for expert in range(layer.count)]
    return found


def _goes_through(change: Tensor, nudge: Tensor) -> bool:
    """Whether a change is the nudge times a number a token, none of which is 0."""
    change = change.reshape(nudge.shape)
    factor = (change * nudge).sum(-1, keepdim=True) / nudge.square().sum(-1, keepdim=True)
    off = (change - factor * nudge).norm(dim=-1)
    return bool((off <= STRAIGHT * change.norm(dim=-1)).all()) and bool((factor.abs() > STRAIGHT).any())


WIDTHS = ("v_head_dim", "head_dim", "global_head_dim")


@dataclass(frozen=True)
class Heads:
    """values: linear that makes them; rows: `[heads, width]` of it. reads: weights of the linears that read
    the heads one beside the other."""

    values: str
    rows: Tensor
    reads: tuple[str, ...]

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.rows.shape[1]


def heads(probe: Probe, folds: Sequence[Fold], config: PretrainedConfig) -> Iterator[Heads]:
    """What may be heads; to be proven."""
    sizes = [getattr(config, name, None) for name in WIDTHS]
    count = getattr(config, "num_attention_heads", 0)
    sizes.append(config.hidden_size // count if isinstance(count, int) and count else None)
    for fold in folds:
        if not isinstance(probe.block.get_submodule(fold.producer.name), nn.Linear):
            continue
        if any(axis != -1 for axis in fold.columns.values()):
            continue
        for width in dict.fromkeys(size for size in sizes if isinstance(size, int) and size > 1):
            rows = _heads(fold.producer.rows.cpu(), width)
            if rows is not None:
                yield Heads(fold.producer.name, rows, tuple(fold.columns))


def _heads(rows: Tensor, width: int) -> Tensor | None:
    """The rows of every head once, `[heads, width]`, if channels `rows [in]` are heads of so many rows."""
    if len(rows) % width:
        return None
    found = rows.view(-1, width)
    if not torch.equal(found, found[:, :1] + torch.arange(width)):
        return None
    return torch.unique(found, dim=0)
