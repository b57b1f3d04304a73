"""Observe a block while a few tokens run through it.

One random linear replaces all experts of a layer. Each expert multiplies its output by a different factor, so
that changes of routing are visible. The experts' own weights are not needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quantkit.models.skeleton.experts import Experts, SortedExperts
from quantkit.quantize.calibrate.forwards import repeated
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import BlockView

TOLERANCE = 1e-5  # relative, in float32: scales are powers of two, but norms that store w - 1 round


@dataclass(frozen=True)
class Observation:
    """Tensors of one forward pass. inputs: by place where linears read, `[..., in]`. entered, left: the first
    input and all outputs of each module with matrices that are not linears. output: of the block."""

    inputs: Mapping[str, Tensor]
    entered: Mapping[str, Tensor]
    left: Mapping[str, list[Tensor]]
    output: Tensor


class Probe:
    """A block in float32 for experiments; see `probing`.

    readers: by place, the sites that read there: one, or those of all experts of a layer. stand_ins: by place
    of such a layer, the linear that replaces its experts. matrices: names of others, by module (routers).
    """

    def __init__(self, view: BlockView):
        self.block, self._run, self._expert = view.block, view.probe, view.expert
        modules = self._named_modules()
        self.layers = {name: module for name, module in modules if isinstance(module, Experts)}
        device = next(tensor.device for tensor in view.block.parameters() if not tensor.is_meta)
        self.stand_ins = {f"{name}.entering": _stand_in(layer, device) for name, layer in self.layers.items()}
        self.readers: dict[str, list[Site]] = {}
        for site in view.sites:
            if site.calls or view.expert:
                self.readers.setdefault(view.shared(site).module, []).append(site)
        self.matrices: dict[str, list[str]] = {}
        for name, module in self.modules().items():
            leaves = [leaf for leaf, matrix in module.named_parameters(recurse=False) if matrix.ndim > 1]
            if leaves and not isinstance(module, nn.Linear):
                self.matrices[name] = leaves

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of the block, except those inside experts, or of a view's expert."""
        inside = tuple(f"{name}." for name in self.layers)
        modules = self._named_modules()
        return {name: module for name, module in modules if not f"{name}.".startswith(inside)}

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self.block.get_submodule(self._expert).named_modules(prefix=self._expert)

    def columns(self, place: str) -> list[str]:
        """Return the names of the weights that read at a place."""
        return [f"{name}.weight" for site in self.readers[place] for name in site.linears]

    def multiply(self, place: str, scale: Tensor) -> None:
        """Multiply the columns of weights that read at a place by a scale; for experts, of their stand-in."""
        stand_in = self.stand_ins.get(place)
        if stand_in is not None:
            stand_in.weight = nn.Parameter(stand_in.weight * scale, requires_grad=False)
            return
        for name in self.columns(place):
            assign(self.block, name, self.block.get_parameter(name) * scale)

    def run(self) -> Observation:
        """Run one forward pass and return its tensors."""
        inputs, entered, left = {}, {}, {}

        def enter(place: str, module: nn.Module, args: tuple) -> None:
            inputs[place] = args[0].float()

        def leave(name: str, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            entered[name] = next(iter(_tensors((args, kwargs))), None)
            left[name] = _tensors(output)

        with ExitStack() as hooks:
            for place in self.readers:
                module = self.block.get_submodule(place)
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, place)))
            for name in self.matrices:
                module = self.block.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(leave, name), with_kwargs=True))
            output = self._run().float()
        return Observation(inputs, entered, left, output)

    def entering(self, place: str, name: str, rows: Tensor) -> Tensor:
        """Return the inputs at `place` if these rows of linear `name` double. The forward pass ends there."""

        def double(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return output * output.new_ones(output.shape[-1]).index_fill_(0, rows, 2)

        linear, reader = self.block.get_submodule(name), self.block.get_submodule(place)
        with linear.register_forward_hook(double):
            (inputs,) = repeated(reader, lambda _: self._run(), 1)
        return inputs.float()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all parameters after the context. Experts are skipped, because they do not change."""
        modules = [*self.modules().values(), *self.stand_ins.values()]
        kept = [(module, dict(module.named_parameters(recurse=False))) for module in modules]
        try:
            yield
        finally:
            for module, parameters in kept:
                for name, parameter in parameters.items():
                    setattr(module, name, parameter)


@contextmanager
def probing(view: BlockView) -> Iterator[Probe]:
    """Yield a probe of the block; after the context its experts compute normally again."""
    probe = Probe(view)
    for name, layer in probe.layers.items():
        layer.forward = _computing(layer, probe.stand_ins[f"{name}.entering"])
    try:
        yield probe
    finally:
        for layer in probe.layers.values():
            del layer.forward


def _stand_in(layer: Experts, device: torch.device) -> nn.Linear:
    """Return a linear with random weights and the width of the layer's experts."""
    width = layer.get_submodule(f"0.{layer.down}").out_features
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    linear = nn.Linear(width, width, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.to(device) / width**0.5, requires_grad=False)
    return linear


def _computing(layer: Experts, linear: nn.Linear) -> Callable:
    """Return a forward for a layer whose experts all are `linear`, each times a different factor."""

    def forward(hidden: Tensor, *routing) -> Tensor:
        output = linear(layer.entering(hidden))
        if isinstance(layer, SortedExperts):
            expert = torch.arange(layer.count).repeat_interleave(len(hidden) // layer.count)
        else:
            index, weights = routing
            return output * (weights * (1 + index / layer.count)).sum(-1, keepdim=True)
        return output * (1 + expert.to(output.device) / layer.count)[:, None]

    return forward


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors agree token by token, so that massive activations of one hide no other."""
    if a.shape != b.shape:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    delta = torch.where(a == b, 0, a - b)  # routers mask by infinity
    whole = b.masked_fill(b.isinf(), 0)
    return bool((delta.norm(dim=-1) <= TOLERANCE * whole.norm(dim=-1)).all())


def assign(block: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Replace a parameter of the block, by default in its dtype."""
    owner, _, leaf = name.rpartition(".")
    dtype = dtype or block.get_parameter(name).dtype
    parameter = nn.Parameter(tensor.detach().to(dtype), requires_grad=False)
    setattr(block.get_submodule(owner), leaf, parameter)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def in_float32(view: BlockView, changed: set[str], modules: Sequence[str] = ("",)) -> Iterator[None]:
    """Hold the parameters of the block, or of some of its modules, in float32 inside the context. Afterwards
    `changed` parameters are rounded as stored; weights to be quantized leave `changed` and stay float32."""
    chosen = {name: view.block.get_submodule(name) for name in modules}
    dtypes = {
        f"{name}.{leaf}" if name else leaf: parameter.dtype
        for name, module in chosen.items()
        for leaf, parameter in module.named_parameters()
    }
    buffers = [(inner, dict(inner._buffers)) for module in chosen.values() for inner in module.modules()]
    for module in chosen.values():
        module.float()
    yield
    for inner, before in buffers:  # no transform changes these
        inner._buffers.update(before)
    quantized = {f"{name}.weight" for name, grid in view.grids.items() if grid}
    changed -= quantized
    for name in dtypes.keys() - quantized:
        tensor = view.block.get_parameter(name).detach()
        assign(view.block, name, view.stored(name, tensor) if name in changed else tensor, dtypes[name])


def set_aside(block: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Round linears' weights to these dtypes for computing. Returns the float32 weights that changed."""
    exact = {}
    for name, dtype in dtypes.items():
        module = block.get_submodule(name)
        if module.weight.dtype != dtype:
            weight = module.weight.detach()
            assign(block, f"{name}.weight", weight, dtype)
            if not torch.equal(module.weight.float(), weight):
                exact[name] = weight
    return exact
