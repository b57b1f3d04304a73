"""R1: readers and writers of a block's residual stream, found by experiments, not from a list.

Multiplying every vector of the stream by an orthogonal Q changes nothing under two conditions. All readers
are norms whose weight g can move into the next linears (these become `W diag(g) Q`), and all writers are
linears (these become `Qᵀ W`) (SliceGPT, arXiv:2401.15024, section 3.1; QuaRot, arXiv:2404.00456, section 4).
LayerNorms subtract the mean and cannot be rotated.

AWQ's folds give the norms and their readers. With the outputs of these norms fixed, a block only adds: a
nudge of its inputs leaves the block unchanged, a nudge of a writer's output times a number per token.

R2: heads whose values can be rotated (SpinQuant, arXiv:2405.16406, section 3.2). Attention averages values.
If the rows of v that make a head's values are multiplied by Rᵀ, so are the head's outputs, and the columns of
o that read them are multiplied by R. Query heads of a group share their values' rows. AWQ's folds give the
rows; running the block shows that nothing in between treats channels differently, as a gate does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from quantkit.quantize.calibrate.residual import Replay, Run
from quantkit.quantize.transforms.fold import Fold
from quantkit.quantize.transforms.probe import Probe

STRAIGHT = 1e-3  # part of a nudge that may change direction by rounding of large states


class NotRotatable(Exception):
    """Raised with the reason, in words for the user, why a model cannot be rotated."""


@dataclass(frozen=True)
class Stream:
    """A residual stream. norms: its readers, by name in the block -> whether the weight acts as 1 + w. reads:
    parameter that reads a norm's output -> the norm. writes: linears that write into the stream."""

    norms: Mapping[str, bool]
    reads: Mapping[str, str]
    writes: Sequence[str]


def find(probe: Probe, folds: Sequence[Fold], run: Run, hidden: Tensor) -> Stream:
    """Return the stream of a block in float32; `run` computes the block.

    Raises NotRotatable if anything but RMSNorms reads the stream.
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
    replay = Replay(block, run, hidden, list(found))

    def passes(writer: str | None = None) -> bool:
        after = replay.nudged(nudge, list(found), writer)
        return _goes_through(after.float() - replay.before.float(), nudge)

    if not passes():
        raise NotRotatable("something else than norms and what they feed reads the hidden states")
    moved = {name: replay.entered[name] - replay.first[name] for name in found}
    norms = [name for name in found if _goes_through(moved[name], nudge)]
    if not norms:
        raise NotRotatable("no norm reads the hidden states")
    writes = [
        linear for name, linears in _writers(probe, width).items() if passes(name) for linear in linears
    ]
    reads = {column: name for name in norms for column in found[name].columns}
    for name in norms:
        refuse_layer_norm(block.get_submodule(name), width)
    return Stream({name: found[name].producer.one_plus for name in norms}, reads, writes)


def refuse_layer_norm(norm: nn.Module, width: int) -> None:
    """Raise NotRotatable if adding a number to all inputs does not change a norm's outputs."""
    weight = norm.weight
    rows = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    with torch.no_grad():
        if torch.allclose(norm(rows), norm(rows + 1), atol=1e-3):
            raise NotRotatable("a LayerNorm subtracts the mean of the hidden states")


def _writers(probe: Probe, width: int) -> dict[str, list[str]]:
    """Return possible writers: linears as wide as the stream, and layers of experts with their linears."""
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
    """Return whether a change is the nudge times a number per token, not all 0."""
    change = change.reshape(nudge.shape)
    factor = (change * nudge).sum(-1, keepdim=True) / nudge.square().sum(-1, keepdim=True)
    off = (change - factor * nudge).norm(dim=-1)
    return bool((off <= STRAIGHT * change.norm(dim=-1)).all()) and bool((factor.abs() > STRAIGHT).any())


WIDTHS = ("v_head_dim", "head_dim", "global_head_dim")


@dataclass(frozen=True)
class Heads:
    """Heads of attention. values: the linear that computes their values. rows: its rows, `[heads, width]`.
    reads: weights whose columns read the heads one after another."""

    values: str
    rows: Tensor
    reads: tuple[str, ...]

    @property
    def width(self) -> int:
        """Return the number of channels of a head."""
        return self.rows.shape[1]


def heads(probe: Probe, folds: Sequence[Fold], config: PretrainedConfig) -> Iterator[Heads]:
    """Yield groups of rows that may be attention's heads; the caller must prove them."""
    sizes = [getattr(config, name, None) for name in WIDTHS]
    count = getattr(config, "num_attention_heads", 0)
    sizes.append(config.hidden_size // count if isinstance(count, int) and count else None)
    for fold in folds:
        if not isinstance(probe.block.get_submodule(fold.producer.name), nn.Linear):
            continue
        for width in dict.fromkeys(size for size in sizes if isinstance(size, int) and size > 1):
            rows = _heads(fold.producer.rows.cpu(), width)
            if rows is not None:
                yield Heads(fold.producer.name, rows, fold.columns)


def _heads(rows: Tensor, width: int) -> Tensor | None:
    """Return the distinct heads' rows, `[heads, width]`; None if channels `rows [in]` form no such heads."""
    if len(rows) % width:
        return None
    found = rows.view(-1, width)
    if not torch.equal(found, found[:, :1] + torch.arange(width)):
        return None
    return torch.unique(found, dim=0)
