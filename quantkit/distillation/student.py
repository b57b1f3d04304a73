"""The student: a compressed checkpoint whose blocks run with given floats.

Codes do not change. Floats are the scales and offsets of linears (`Grid.floats`) and all values of norms and
biases. They are arguments of each run of a block, so autograd can follow from the block's output to them.
Between runs, a block takes one byte per weight.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.grid import QuantizedWeight
from quantkit.layouts import Layout, naming_errors
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.reading import DTYPES
from quantkit.models.gguf.checkpoint import GgufCheckpoint
from quantkit.models.machine import processor
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton.linears import linears

Floats = dict[str, Tensor]  # float32, by names in a block (`mlp.up_proj.weight.scale`) or in the model


@dataclass(frozen=True)
class TracedBlock:
    """A loaded block. prefix: of its names in the model. weights, layouts: by packed linear. floats: the
    stored values of all that is trained. dtypes: stored dtypes of norms and biases. rounding: linears whose
    clients also round activations."""

    index: int
    prefix: str
    weights: dict[str, QuantizedWeight]
    layouts: dict[str, Layout]
    floats: Floats
    dtypes: dict[str, torch.dtype]
    rounding: frozenset[str] = frozenset()

    def of_model(self, floats: Mapping[str, Tensor]) -> Floats:
        """Return the block's floats from the model's `floats`, by names in the block."""
        return {name: floats[self.prefix + name] for name in self.floats}

    def of_linear(self, local: str, floats: Mapping[str, Tensor]) -> Floats:
        """Return the floats of the linear `local` from the block's `floats`, by the grid's names."""
        names = self.weights[local].floats()
        return {name: floats[f"{local}.weight.{name}"] for name in names}

    def values(self, floats: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the block's parameters by name, decoded with `floats` in `dtype`; autograd can follow."""
        values = {name: floats[name].to(dtype) for name in self.dtypes}
        for local, weight in self.weights.items():
            changed = weight.with_floats(self.of_linear(local, floats))
            values[f"{local}.weight"] = changed.values().to(dtype)
        return values

    def stored(self, floats: Mapping[str, Tensor]) -> Floats:
        """Return the floats after rounding to the types in which they are stored, as float32."""
        stored = {name: floats[name].to(dtype).float() for name, dtype in self.dtypes.items()}
        for local, weight in self.weights.items():
            storable = weight.grid.storable(self.of_linear(local, floats))
            stored |= {f"{local}.weight.{name}": value for name, value in storable.items()}
        return {name: stored[name] for name in self.floats}


class Student:
    """A compressed checkpoint to train, in `dtype` on `device`. specs: of its packed linears."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        if isinstance(checkpoint, GgufCheckpoint):
            specs = linears(Skeleton(checkpoint, dtype, device))
            checkpoint = checkpoint.coded([spec.name for spec in specs])  # they stay packed when read
        self.skeleton = Skeleton(checkpoint, dtype, device)
        self.skeleton.names.check_complete()
        self.skeleton.streams = False  # a block is trained as a whole
        self.checkpoint = self.skeleton.checkpoint
        self.specs = [
            spec for spec in linears(self.skeleton) if self.checkpoint.is_quantized(f"{spec.name}.weight")
        ]
        self._loaded: dict[int, TracedBlock] = {}
        self._checked: set[int] = set()  # blocks already checked by refuse_unlike

    @property
    def depth(self) -> int:
        return len(self.skeleton.blocks)

    @contextmanager
    def block(self, index: int, hold: bool = False) -> Iterator[TracedBlock]:
        """Yield a loaded block and free it afterwards. hold: keep it in memory for later calls."""
        if index in self._loaded:
            yield self._loaded[index]
            return
        loaded = self._load(index)
        if hold:
            self._loaded[index] = loaded
        yield loaded
        if not hold:
            self.skeleton.free_block(index)

    def _load(self, index: int) -> TracedBlock:
        """Load a block. Raises QuantkitError for a linear that quantkit cannot write as it is stored."""
        skeleton = self.skeleton
        fetched = skeleton.fetch_block(index)
        module = skeleton.load_block(index, fetched=replace(fetched, packed={}))
        plain = {name: p.float() for name, p in module.named_parameters() if not p.is_meta}
        floats = {name: plain[name].clone() for name in vectors(module) if name in plain}
        dtypes = {name: skeleton.stored_dtype(index, name) for name in floats}
        weights, layouts, rounding = {}, {}, set()
        for name, parts in fetched.packed.items():
            local, stored = name.removesuffix(".weight"), parts.linear
            layouts[local] = skeleton.checkpoint.layout.at(stored)
            if index not in self._checked:
                refuse_unlike(layouts[local], stored, parts)
            placed = {suffix: tensor.to(skeleton.device) for suffix, tensor in parts.items()}
            with naming_errors(stored, placed):
                weights[local] = layouts[local].decode(placed)
            if layouts[local].rounds_inputs:
                values = weights[local].values()
                if layouts[local].module(placed, None, values, False) is not None:
                    rounding.add(local)
            for kind, value in weights[local].floats().items():
                floats[f"{local}.weight.{kind}"] = value.clone(memory_format=torch.contiguous_format)
        self._checked.add(index)
        prefix = skeleton.names.of_block(index, "")
        return TracedBlock(index, prefix, weights, layouts, floats, dtypes, frozenset(rounding))

    def run(self, block: TracedBlock, hidden: Tensor, floats: Mapping[str, Tensor]) -> Tensor:
        """Return a block's output for `hidden`, computed with `floats`; autograd can follow if enabled."""
        with _rounded_inputs(self.skeleton.blocks[block.index], block, floats):
            return self.skeleton.trace_block(block.index, hidden, block.values(floats, self.skeleton.dtype))

    def outputs(
        self, block: TracedBlock, batches: Iterable[Tensor], floats: Mapping[str, Tensor]
    ) -> Iterator[Tensor]:
        """Yield the output of `run` for each batch, without gradients; decode weights only once."""
        with torch.no_grad():
            values = block.values(floats, self.skeleton.dtype)
        for hidden in batches:
            with torch.no_grad(), _rounded_inputs(self.skeleton.blocks[block.index], block, floats):
                output = self.skeleton.trace_block(block.index, hidden, values)
            yield output

    def floats(self, hold: bool) -> Floats:
        """Return the stored floats of all blocks, by names in the model, on the CPU. hold: see `block`."""
        floats = {}
        for index in range(self.depth):
            with self.block(index, hold) as block:
                floats |= {block.prefix + name: value.cpu() for name, value in block.floats.items()}
        return floats

    def rest(self) -> TracedBlock:
        """Return the norms and biases outside the blocks as a block without linears, by names in the model.
        `load_rest` must run before their values are used."""
        names, inside = self.skeleton.names, f"{self.skeleton.names.blocks}."
        named = dict(self.skeleton.model.named_parameters())
        trained = [n for n in vectors(self.skeleton.model) if not n.startswith(inside) and n in names.stored]
        dtypes = {n: DTYPES[self.checkpoint.infos[names.stored[n]].dtype] for n in trained}
        floats = {n: named[n] if named[n].is_meta else named[n].float().clone() for n in trained}
        return TracedBlock(self.depth, "", {}, {}, floats, dtypes)

    def logits(self, hidden: Tensor, rest: Mapping[str, Tensor]) -> Tensor:
        """Return logits `[tokens, vocabulary]` of `hidden [tokens, hidden]`; rest: floats outside blocks."""
        place = self.skeleton.device, self.skeleton.dtype
        return self.skeleton.logits(hidden, {name: value.to(*place) for name, value in rest.items()})


def vectors(module: nn.Module) -> list[str]:
    """Return the names of norms' vectors and of biases. Other vectors, such as decays of state-space models
    or routers' corrections, are not trained."""
    names = []
    for owner, child in module.named_modules():
        for leaf, parameter in child.named_parameters(recurse=False):
            norm = "norm" in type(child).__name__.lower()
            if parameter.ndim == 1 and (leaf == "bias" or norm):
                names.append(f"{owner}.{leaf}" if owner else leaf)
    return names


def _equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal; 8-bit floats are compared as bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.view(torch.uint8).equal(right.view(torch.uint8)) if left.itemsize == 1 else left.equal(right)


def refuse_unlike(layout: Layout, linear: str, parts: Mapping[str, Tensor]) -> None:
    """Raise QuantkitError if the layout, given a linear's own floats, would store other tensors."""
    again = layout.with_floats(parts, layout.decode(parts).floats())
    unlike = [name for name, old in parts.items() if not _equal(old, again[name])]
    if unlike:
        stored = f"{parts[unlike[0]].dtype} {list(parts[unlike[0]].shape)}"
        what = f"{linear}.{unlike[0]} is stored as {stored} in a way that quantkit reads but does not write"
        raise QuantkitError(what, "compress the teacher with quantkit, and distill that", UNSUPPORTED)


@contextmanager
def _rounded_inputs(module: nn.Module, block: TracedBlock, floats: Mapping[str, Tensor]) -> Iterator[None]:
    """During the context, round activations as the layouts of `block.rounding` do; gradients ignore it."""

    def rounded(local: str, linear: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
        with torch.no_grad():
            weight, layout = block.weights[local], block.layouts[local]
            kept = weight.grid.storable(block.of_linear(local, floats))
            encoded = layout.encode(weight.with_floats(kept))
            values, products = layout.values(encoded), processor.has_int8_products()
            client = layout.module(encoded, linear.bias, values, products)
            exact = client(inputs[0].detach())
        return output + (exact - output).detach() if torch.is_grad_enabled() else exact

    with ExitStack() as hooks:
        for local in sorted(block.rounding):
            hooks.enter_context(module.get_submodule(local).register_forward_hook(partial(rounded, local)))
        yield
