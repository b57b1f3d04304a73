"""R1: who reads the residual stream of a block, and who writes into it. Found by trying, not listed.

If every vector of the stream is multiplied by an orthogonal Q, nothing changes, provided that whatever
reads it is a norm whose weight g can move into the linears behind it (these become `W diag(g) Q`), and
whatever writes into it is a linear (which becomes `Qᵀ W`) (SliceGPT, arXiv:2401.15024, section 3.1; QuaRot,
arXiv:2404.00456, section 4). A norm's bias b becomes `(b / g) Q`.

The folds of AWQ's scales say which norms there are and who reads them. With the outputs of these norms held
fast, a block does nothing but add: a nudge of its inputs comes out as it is, and so does, times a number a
token, a nudge of what a writer writes. What comes out otherwise is no stream that turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.quantize.transforms.fold import Fold
from quantkit.quantize.transforms.probe import Probe

STRAIGHT = 1e-3  # part of a nudge that may come out in another direction: rounding of large states
Run = Callable[[Tensor], Tensor]  # a block on hidden states `[batch, tokens, hidden]`


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
    held = _Held(probe, list(found), run)
    before = held.run(hidden)
    after = held.run(hidden + nudge)
    if not _goes_through(after - before, nudge):
        raise Untouchable("something else than norms and what they feed reads the hidden states")
    moved = {name: held.entered[name] - held.first[name] for name in found}
    norms = [name for name in found if _goes_through(moved[name], nudge)]
    if not norms:
        raise Untouchable("no norm reads the hidden states")
    writes = [
        linear
        for name, linears in _writers(probe, width).items()
        if held.adds(name, hidden, before, nudge)
        for linear in linears
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
        if layer.down and not layer.form.normed:
            found[name] = [f"{name}.{expert}.{layer.down}" for expert in range(layer.count)]
    return found


def _goes_through(change: Tensor, nudge: Tensor) -> bool:
    """Whether a change is the nudge times a number a token, none of which is 0."""
    change = change.reshape(nudge.shape)
    factor = (change * nudge).sum(-1, keepdim=True) / nudge.square().sum(-1, keepdim=True)
    off = (change - factor * nudge).norm(dim=-1)
    return bool((off <= STRAIGHT * change.norm(dim=-1)).all()) and bool((factor.abs() > STRAIGHT).any())


class _Held:
    """A block whose norms return what they returned in the first run. first, entered: what they were given
    then, and in the last run."""

    def __init__(self, probe: Probe, norms: Sequence[str], run: Run):
        self._block, self._run, self._norms = probe.block, run, norms
        self._returned: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}
        self.entered: dict[str, Tensor] = {}

    def run(self, hidden: Tensor, writer: str | None = None, nudge: Tensor | None = None) -> Tensor:
        """The block's output; `nudge` is added to what `writer` returns."""

        def hold(name: str) -> Callable:
            def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
                self.entered[name] = args[0]
                self.first.setdefault(name, args[0])
                return self._returned.setdefault(name, output)

            return hook

        def add(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output + nudge.reshape(output.shape) if output.numel() == nudge.numel() else output

        with ExitStack() as stack:
            for name in self._norms:
                stack.callback(self._block.get_submodule(name).register_forward_hook(hold(name)).remove)
            if writer is not None:
                stack.callback(self._block.get_submodule(writer).register_forward_hook(add).remove)
            return self._run(hidden).float()

    def adds(self, writer: str, hidden: Tensor, before: Tensor, nudge: Tensor) -> bool:
        """Whether what a module returns is added to the stream."""
        return _goes_through(self.run(hidden, writer, nudge) - before, nudge)
