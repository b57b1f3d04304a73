"""Split fused experts: one linear per expert and projection instead of transformers' 3-D parameters.

transformers fuses experts into `gate_up_proj [experts, 2 * inner, hidden]` and
`down_proj [experts, hidden, inner]` when it loads a mixture. Its decorator `use_experts_implementation` says
how: transposed, concatenated or interleaved, with biases, without a gate. Here they become linears with the
checkpoint's names, so that sites, grids, solvers and layouts only see linears.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton.fused import Form, Fused, form_of, one_by_one
from quantkit.models.skeleton.streaming import ExpertLinear

USUAL = ("gate_proj", "up_proj", "down_proj")
SOURCE = re.compile(r"experts\.\*\.(\w+)\.weight$")  # one expert's projection in a conversion's patterns


@dataclass(frozen=True)
class Routed:
    """The input of a layer of experts in one forward pass. hidden: `[n, hidden]`; rows: which rows of
    `hidden` each expert gets."""

    hidden: Tensor
    rows: Sequence[Tensor | slice]

    def count(self, index: int) -> int:
        """Return the number of rows of one expert."""
        rows = self.rows[index]
        return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


class Experts(nn.Module):
    """All experts of a layer; child `E` is expert E with one linear per projection. names: of gate, up and
    down.

    A forward pass computes gate and up of all experts before any down. Module `entering` sees the inputs of
    all experts, and `between` the inputs of all down projections, one row per token and expert. Every linear
    is called once per forward pass, possibly without tokens.
    """

    def __init__(self, fused: nn.Module, form: Form, names: tuple[str, str, str]):
        super().__init__()
        self.__dict__["fused"] = fused  # not a child: the linears hold its parameters
        self.form = form
        for name, child in fused.named_children():
            self.add_module(name, child)
        self.gate, self.up, self.down = names
        experts, *sizes = fused.down_proj.shape
        inner, hidden = sizes if form.transposed else reversed(sizes)
        self.count = experts
        self.entering, self.between = nn.Identity(), nn.Identity()
        first = (self.gate, self.up) if form.gated else (self.up,)
        factory = {"bias": form.biased, "dtype": fused.down_proj.dtype, "device": "meta"}
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

    def _outputs(self, hidden: Tensor, rows: Sequence[Tensor | slice]) -> Iterator[Tensor]:
        """Return each expert's output for its rows of `hidden`, computed one after another."""
        hidden = self.entering(hidden)
        inner = [self.inner(expert, hidden[chosen]) for expert, chosen in enumerate(rows)]
        counts = [len(states) for states in inner]
        inner = torch.cat(inner)
        # the inputs of down are released: batches may be suspended at the next line
        inner = self.between(inner).split(counts)
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
        return self.fused.post_expert_norm(output) if self.form.normed else output

    def inner(self, index: int, hidden: Tensor) -> Tensor:
        """Return the input of one expert's down projection for `hidden [tokens, hidden]`, with the
        architecture's own gate.

        Linears are looked up right before the call, because an earlier call may have replaced them.
        """
        expert = self.get_submodule(str(index))
        gate = expert.get_submodule(self.gate)(hidden) if self.form.gated else None
        up = expert.get_submodule(self.up)(hidden)
        if gate is None:
            return self.fused.act_fn(up)
        if not hasattr(self.fused, "_apply_gate"):
            return self.fused.act_fn(gate) * up
        concatenated = self.form.concatenated
        both = torch.cat((gate, up), -1) if concatenated else torch.stack((gate, up), -1).flatten(-2)
        return self.fused._apply_gate(both)


class SortedExperts(Experts):
    """Experts as in Llama 4: the input `[experts * tokens, hidden]` has all tokens for every expert, already
    weighted; tokens that are not routed to an expert are zeros, and so are their outputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the experts' outputs for all rows."""
        routed = self.routed(hidden)
        outputs = torch.cat(list(self._outputs(routed.hidden, routed.rows)))
        out = torch.zeros_like(hidden)
        out[hidden.any(-1)] = outputs
        return out

    def routed(self, hidden: Tensor) -> Routed:
        """Return which rows of the input go to each expert."""
        routed = hidden.any(-1)
        counts = routed.view(self.count, -1).sum(-1).tolist()
        rows = [slice(e - n, e) for e, n in zip(accumulate(counts), counts, strict=True)]
        return Routed(hidden[routed], rows)


def take_apart(model: nn.Module, layers: Sequence[Fused] | None = None) -> None:
    """Replace all fused experts of a model on the meta device by `Experts`."""
    for layer in fused_layers(model) if layers is None else layers:
        kind = Experts if layer.form.routes else SortedExperts
        model.set_submodule(layer.path, kind(layer.module, layer.form, layer.names))


def of_checkpoint(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Split the model's fused experts, and return the checkpoint with one tensor per expert and projection;
    see `fused.one_by_one`."""
    layers = fused_layers(model)
    checkpoint = one_by_one(model, checkpoint, layers) if layers else checkpoint
    take_apart(model, layers)
    return checkpoint


def fused_layers(model: nn.Module) -> list[Fused]:
    """Return the layers whose experts transformers fuses into 3-D parameters."""
    names = _names(model)
    modules = ((path, module, form_of(module)) for path, module in model.named_modules())
    return [Fused(path, module, form, names) for path, module, form in modules if form is not None]


def _names(model: nn.Module) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down projections in this model's checkpoints."""
    names: dict[str, list[str]] = {}
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightConverter):
            sources = [match[1] for pattern in rule.source_patterns if (match := SOURCE.search(pattern))]
            (target,) = rule.target_patterns[:1]
            for kind in ("gate_up_proj", "down_proj"):
                if sources and target.endswith(f"experts.{kind}"):
                    names[kind] = sources
    first, last = names.get("gate_up_proj", list(USUAL[:2])), names.get("down_proj", [USUAL[2]])
    return (*first, *last) if len(first) == 2 else USUAL
