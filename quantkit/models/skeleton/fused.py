"""Fused experts of a checkpoint: which slice of a stacked tensor is one expert's projection.

Some model families store all experts of a layer in one tensor, like transformers' parameters (`Fused` says
how). For these, the checkpoint is made to look as if each expert and projection had its own tensor, a slice
of the stored one, with the names of families that store experts one by one.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from quantkit.errors import QuantkitError
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.reading import Computed, Index, read
from quantkit.models.files.safetensors_folder import DTYPE_BYTES, TensorInfo
from quantkit.models.skeleton import meta_model

BIAS = "_bias"
GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
USUAL = ("gate_proj", "up_proj", "down_proj")
SOURCE = re.compile(r"experts\.\*\.(\w+)\.weight$")  # one expert's projection in a conversion's patterns


@dataclass(frozen=True)
class Fused:
    """The experts of a layer, stacked in a module: `down_proj [experts, hidden, inner]` and
    `gate_up_proj [experts, 2 * inner, hidden]`, or `up_proj` of half that size without gates.

    path: the module's name in the model. names: of an expert's gate, up and down. transposed: the last two
    axes are swapped. concatenated: all of gate's outputs come before up's; otherwise they alternate. biased:
    there are biases `…_proj_bias` without the last axis. normed: a norm follows each expert. routes: forward
    gets each token's experts; otherwise the tokens of all experts in turn.
    """

    path: str
    module: nn.Module
    names: tuple[str, str, str]
    transposed: bool
    concatenated: bool = True
    biased: bool = False
    gated: bool = True
    normed: bool = False
    routes: bool = True

    def parts(self) -> Iterator[tuple[str, str, slice]]:
        """Yield each parameter, the projection in it (such as `gate_proj.weight`), and the slice of its
        outputs that is this projection."""
        gate, up, down = self.names
        rows = [(UP, up, slice(None)), (DOWN, down, slice(None))]
        if self.gated:
            inner = self.module.down_proj.shape[1 if self.transposed else 2]
            halves = slice(0, inner), slice(inner, 2 * inner)
            if not self.concatenated:
                halves = slice(0, None, 2), slice(1, None, 2)
            rows = [(GATE_UP, gate, halves[0]), (GATE_UP, up, halves[1]), rows[1]]
        for parameter, name, outputs in rows:
            yield parameter, f"{name}.weight", outputs
            if self.biased:
                yield parameter + BIAS, f"{name}.bias", outputs

    def directory(self, stored: str) -> str:
        """Return the name of the experts in a checkpoint whose stacked tensor is called `stored`."""
        directory, _, last = stored.rpartition(".")
        if last.startswith((GATE_UP, UP, DOWN)):
            return directory
        head = re.split(r"\.\d+\.", stored, maxsplit=1)[0]  # GraniteMoE's are not inside this module
        above = re.split(r"\.\d+\.", self.path, maxsplit=1)[0]
        return head + self.path.removeprefix(above)

    def slices(self, parameter: str, part: str, outputs: slice, info: TensorInfo) -> dict[str, Computed]:
        """Return the slice `part` of a stored parameter for every expert. outputs: rows of the slice. Keys
        are names in the model.

        Raises QuantkitError if the stored shape differs from the parameter's.
        """
        expected = tuple(self.module.get_parameter(parameter).shape)
        matrices = len(expected) == 3
        transposed = matrices and self.transposed
        if info.shape != expected:  # some families are stored in both orientations
            if not matrices or info.shape != (expected[0], *expected[:0:-1]):
                what = f"{info.name} is {list(info.shape)}, the configuration says {list(expected)}"
                if info.shape[1:] == expected[1:]:
                    what += f": {info.shape[0]} experts instead of {expected[0]}"
                raise QuantkitError(what, "config.json and weights belong to different models")
            transposed = not transposed
        rest = (slice(None), outputs) if transposed else (outputs,)
        view = torch.empty(info.shape[1:], device="meta")[rest]
        shape = tuple(view.t().shape if transposed else view.shape)
        nbytes = view.numel() * DTYPE_BYTES.get(info.dtype, 1)
        directory = self.directory(info.name)
        slices = {}
        for expert in range(expected[0]):
            name = f"{directory}.{expert}.{part}"
            values = partial(_sliced, info, (expert, *rest), transposed)
            slices[name] = Computed(name, info.dtype, shape, info.file, info.offset, nbytes, values, info)
        return slices


def fused_layers(model: nn.Module) -> list[Fused]:
    """Return the layers whose experts transformers fuses into 3-D parameters."""
    names = _names(model)
    layers = (_layer(path, module, names) for path, module in model.named_modules())
    return [layer for layer in layers if layer]


def _layer(path: str, module: nn.Module, names: tuple[str, str, str]) -> Fused | None:
    """Return how a module stacks its experts; None if it holds none.

    transformers' decorator says how; for a class without it (Llama 4), the shapes do.
    """
    ranks = {name: parameter.ndim for name, parameter in module.named_parameters(recurse=False)}
    if ranks.get(DOWN) != 3:
        return None
    if hasattr(module, "is_concatenated"):
        how = module.is_transposed, module.is_concatenated, module.has_bias, module.has_gate
        return Fused(path, module, names, *how, normed=module.has_post_expert_norm)
    arguments = len(inspect.signature(module.forward).parameters)
    if ranks != {GATE_UP: 3, DOWN: 3} or not hasattr(module, "act_fn") or arguments not in (1, 3):
        return None
    experts, rows, columns = module.down_proj.shape
    transposed = {(experts, columns, 2 * rows): True, (experts, 2 * columns, rows): False}
    known = transposed.get(tuple(module.gate_up_proj.shape))
    return None if known is None else Fused(path, module, names, known, routes=arguments == 3)


def _names(model: nn.Module) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down projections in this model's checkpoints."""
    names: dict[str, list[str]] = {}
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightConverter):
            sources = [match[1] for pattern in rule.source_patterns if (match := SOURCE.search(pattern))]
            (target,) = rule.target_patterns[:1]
            for kind in (GATE_UP, DOWN):
                if sources and target.endswith(f"experts.{kind}"):
                    names[kind] = sources
    first, last = names.get(GATE_UP, list(USUAL[:2])), names.get(DOWN, [USUAL[2]])
    return (*first, *last) if len(first) == 2 else USUAL


def _sliced(whole: TensorInfo, index: Index, transposed: bool) -> Tensor:
    values = read(whole, index)
    return values.t() if transposed else values


def one_by_one(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with one tensor per expert and projection. model: still has fused parameters.
    Raises QuantkitError if a stored shape differs from a parameter's."""
    if not (layers := fused_layers(model)):
        return checkpoint
    stored = meta_model.resolve_names(model, checkpoint.names)
    infos = dict(checkpoint.infos)
    for layer in layers:
        for parameter, part, outputs in layer.parts():
            name = stored.get(f"{layer.path}.{parameter}")
            if name in checkpoint.infos:
                infos.pop(name, None)
                infos |= layer.slices(parameter, part, outputs, checkpoint.infos[name])
    return replace(checkpoint, infos=infos) if infos != checkpoint.infos else checkpoint
