"""Split fused experts: one linear per expert and projection instead of transformers' 3-D parameters.

transformers fuses experts into `gate_up_proj [experts, 2 * inner, hidden]` and
`down_proj [experts, hidden, inner]` when it loads a mixture. Its decorator `use_experts_implementation` says
how: transposed, concatenated or interleaved, with biases, without a gate. Here they become linears with the
checkpoint's names, so that sites, grids, solvers and layouts only see linears.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantkit.models.skeleton.fused import Fused, fused_layers
from quantkit.models.skeleton.streaming import ExpertLinear


class Routed(NamedTuple):
    """The input of experts in one forward pass. hidden: `[n, hidden]`; rows: which rows each expert gets."""

    hidden: Tensor
    rows: Sequence[Tensor]


class Experts(nn.Module):
    """All experts of a layer; child `E` is expert E with one linear per projection. gate, up, down: names of
    the linears.

    A forward pass computes gate and up of all experts before any down. Module `entering` sees the inputs of
    all experts, and `between` the inputs of all down projections, one row per token and expert. Every linear
    is called once per forward pass, possibly without tokens.
    """

    def __init__(self, layer: Fused):
        super().__init__()
        self.layer, fused = layer, layer.module
        for name, child in fused.named_children():
            self.add_module(name, child)
        self.gate, self.up, self.down = layer.names
        experts, *sizes = fused.down_proj.shape
        inner, hidden = sizes if layer.transposed else reversed(sizes)
        self.count = experts
        self.entering, self.between = nn.Identity(), nn.Identity()
        first = (self.gate, self.up) if layer.gated else (self.up,)
        factory = {"bias": layer.biased, "dtype": fused.down_proj.dtype, "device": "meta"}
        for expert in range(experts):
            child = nn.Module()
            for name in first:
                child.add_module(name, ExpertLinear(hidden, inner, **factory))
            child.add_module(self.down, ExpertLinear(inner, hidden, **factory))
            self.add_module(str(expert), child)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the output for `hidden [tokens, hidden]`, given each token's experts and weights
        `[tokens, k]`."""
        chosen = self._chosen(top_k_index)
        outputs = self._outputs(hidden, [rows for rows, _ in chosen])
        out = torch.zeros_like(hidden)
        for (rows, ranks), output in zip(chosen, outputs, strict=True):
            out.index_add_(0, rows, (output * top_k_weights[rows, ranks, None]).to(out.dtype))
        return out

    def _outputs(self, hidden: Tensor, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return each expert's output for its rows of `hidden`, computed one after another."""
        hidden = self.entering(hidden)
        inner = torch.cat([self.inner(expert, hidden[chosen]) for expert, chosen in enumerate(rows)])
        # the inputs of down are released: batches may be suspended at the next line
        inner = self.between(inner).split([len(chosen) for chosen in rows])
        return (self._output(expert, states) for expert, states in enumerate(inner))

    def routed(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Routed:
        """Return which rows of the input go to each expert."""
        return Routed(hidden, [rows for rows, _ in self._chosen(top_k_index)])

    def _chosen(self, top_k_index: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the rows of each expert in `top_k_index [tokens, k]`, and its columns there. The host waits
        for the device once, not for each expert."""
        flat, k = top_k_index.flatten(), top_k_index.shape[1]
        counts = torch.bincount(flat, minlength=self.count)[: self.count].tolist()
        order = torch.argsort(flat, stable=True)[: sum(counts)]
        return list(zip((order // k).split(counts), (order % k).split(counts), strict=True))

    def alone(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of one expert for all of `hidden [tokens, hidden]`, without the router."""
        return self._output(index, self.inner(index, hidden))

    def _output(self, index: int, inner: Tensor) -> Tensor:
        """Return the output of one expert for the inputs of its down projection."""
        output = self.get_submodule(f"{index}.{self.down}")(inner)
        return self.layer.module.post_expert_norm(output) if self.layer.normed else output

    def inner(self, index: int, hidden: Tensor) -> Tensor:
        """Return the input of one expert's down projection for `hidden [tokens, hidden]`, with the
        architecture's own gate.

        Linears are looked up right before the call, because an earlier call may have replaced them.
        """
        expert = self.get_submodule(str(index))
        gate = expert.get_submodule(self.gate)(hidden) if self.layer.gated else None
        up = expert.get_submodule(self.up)(hidden)
        if gate is None:
            return self.layer.module.act_fn(up)
        if not hasattr(self.layer.module, "_apply_gate"):
            return self.layer.module.act_fn(gate) * up
        concatenated = self.layer.concatenated
        both = torch.cat((gate, up), -1) if concatenated else torch.stack((gate, up), -1).flatten(-2)
        return self.layer.module._apply_gate(both)


class SortedExperts(Experts):
    """Experts as in Llama 4: the input `[experts * tokens, hidden]` has all tokens for every expert, already
    weighted; tokens that are not routed to an expert are zeros, and so are their outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        routed = self.routed(hidden)
        outputs = torch.cat(list(self._outputs(routed.hidden, routed.rows)))
        out = torch.zeros_like(hidden)
        out[hidden.any(-1)] = outputs
        return out

    def routed(self, hidden: Tensor) -> Routed:
        """Return which rows of the input go to each expert."""
        routed = hidden.any(-1)
        counts = routed.view(self.count, -1).sum(-1).tolist()
        return Routed(hidden[routed], torch.arange(sum(counts), device=hidden.device).split(counts))


def take_apart(model: nn.Module) -> None:
    """Replace all fused experts of a model on the meta device by `Experts`."""
    for layer in fused_layers(model):
        model.set_submodule(layer.path, Experts(layer) if layer.routes else SortedExperts(layer))
