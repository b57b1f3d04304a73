"""Which scales can be folded away: proven on the block itself, not listed by architecture.

The inputs of a site may be divided by s, and the columns of its linears multiplied by it, if whatever
produces those inputs can be divided by s instead: a norm's weight, or rows of another linear (v for o
through attention, up for down, fc1 for fc2 through ReLU). A guess is tried with random powers of two,
by which every product scales without rounding: if the site's inputs are divided, and neither the inputs
of any other site nor the block's output move, the pair is foldable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.quantize.capture import Site
from quantkit.quantize.transforms import BlockView

TOLERANCE = 1e-5  # of a block in float32: scales are powers of two, but norms that store w - 1 round
GRANULES = 16, 64  # rows of a fused linear tried together, up to LARGE and beyond: heads are multiples
LARGE = 4096


@dataclass(frozen=True)
class Producer:
    """Where a site's scales go. name: a module of the block. rows: int64 `[in]`, the row of its weight that
    each input channel of the site follows; grouped heads share rows. one_plus: its weight acts as 1 + w.
    """

    name: str
    rows: Tensor
    one_plus: bool = False

    def tied(self, channels: Tensor) -> Tensor:
        """The mean of `channels [in]` over the channels that share a row, `[in]`.

        On the host: CUDA adds up in any order, and the same job is to write the same bytes twice.
        """
        rows, values = self.rows.cpu(), channels.cpu()
        count = int(rows.max()) + 1
        sums = values.new_zeros(count).index_add_(0, rows, values)
        return (sums / torch.bincount(rows, minlength=count).clamp(min=1))[rows].to(channels.device)

    def divided(self, block: nn.Module, scale: Tensor) -> dict[str, Tensor]:
        """The producer's parameters, float32, by their names in the block, for products divided by `scale
        [in]`, equal on channels that share a row."""
        module = block.get_submodule(self.name)
        factor = torch.ones(len(module.weight), dtype=torch.float32, device=scale.device)
        factor[self.rows] = 1 / scale
        weight = module.weight.float()
        if weight.ndim == 2:
            weight = weight * factor[:, None]
        else:
            weight = (1 + weight) * factor - 1 if self.one_plus else weight * factor
        found = {f"{self.name}.weight": weight}
        if getattr(module, "bias", None) is not None:
            found[f"{self.name}.bias"] = module.bias.float() * factor
        return found


def find_producer(view: BlockView, site: Site) -> Producer | None:
    """The module into which scales of `site` can be folded; None where there is none.

    What was found in other blocks plays no part: a job that was resumed has not seen them.
    """
    before = _observe(view)
    width = before.inputs[site].shape[-1]
    for candidate in _candidates(view, site, width, before):
        if _proven(view, site, candidate, before):
            return candidate
    return None


@dataclass(frozen=True)
class _Observation:
    """What a forward of the probe tokens showed: the inputs of every site, and the block's output."""

    inputs: Mapping[Site, Tensor]
    output: Tensor


def _observe(view: BlockView) -> _Observation:
    inputs: dict[Site, Tensor] = {}
    handles = [
        view.block.get_submodule(site.linears[0]).register_forward_pre_hook(
            lambda module, args, site=site: inputs.update({site: args[0].float()})
        )
        for site in view.sites
    ]
    try:
        output = view.probe().float()
    finally:
        for handle in handles:
            handle.remove()
    return _Observation(inputs, output)


def _candidates(view: BlockView, site: Site, width: int, before: _Observation) -> Iterator[Producer]:
    """Guesses, the likely ones first: norms, linears row by channel, then parts of larger or smaller ones."""
    identity = torch.arange(width, device=before.output.device)
    inside = f"{site.linears[0].rpartition('.')[0]}." if site.pool else ""  # an expert's producer is its own
    modules = [
        (name, module)
        for name, module in view.block.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and name not in site.linears
        if name.startswith(inside)
    ]
    for name, module in modules:
        if module.weight.shape == (width,):
            yield Producer(name, identity)
            yield Producer(name, identity, one_plus=True)
    linears = [(name, module) for name, module in modules if isinstance(module, nn.Linear)]
    for name, module in linears:
        if module.out_features == width:
            yield Producer(name, identity)
    for name, module in linears:
        rows = _followed_rows(view, site, name, module.out_features, before)
        if rows is not None:
            yield Producer(name, rows)


def _proven(view: BlockView, site: Site, producer: Producer, before: _Observation) -> bool:
    """Whether scales of the site's inputs, drawn at random, can be folded into `producer`."""
    generator = torch.Generator().manual_seed(len(producer.rows))
    count = int(producer.rows.max()) + 1
    exponents = torch.randint(-1, 2, (count,), generator=generator).to(producer.rows.device)
    scale = torch.exp2(exponents.float())[producer.rows]
    with _restored(view.block, [producer.name, *site.linears]):
        new = producer.divided(view.block, scale)
        new |= {f"{name}.weight": view.block.get_submodule(name).weight * scale for name in site.linears}
        for name, tensor in new.items():
            assign(view.block, name, tensor)
        after = _observe(view)
    if not _alike(after.inputs[site] * scale, before.inputs[site]):
        return False
    others = [other for other in view.sites if other != site]
    if not all(_alike(after.inputs[other], before.inputs[other]) for other in others):
        return False
    return _alike(after.output, before.output)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Token by token: one token with massive activations would hide what happens to all others."""
    return bool(((a - b).norm(dim=-1) <= TOLERANCE * b.norm(dim=-1)).all())


def _followed_rows(
    view: BlockView, site: Site, name: str, out_features: int, before: _Observation
) -> Tensor | None:
    """For every channel of the site, the row of linear `name` it is proportional to, `[in]`.

    Rows that act on nothing but single channels are found by halving; which of them a channel follows
    is then read off bit by bit: with bit k of their number set, rows are doubled, and channels with them.
    """
    granule = math.gcd(out_features, GRANULES[out_features > LARGE])
    everything = torch.arange(out_features, device=before.output.device)
    if _response(view, site, name, everything, before) is _UNMOVED:
        return None
    rows = torch.cat(list(_proportional(view, site, name, everything, granule, before)) or [everything[:0]])
    if not len(rows):
        return None
    numbers = torch.zeros(before.inputs[site].shape[-1], dtype=torch.long, device=rows.device)
    response = _response(view, site, name, rows, before)
    if not isinstance(response, Tensor) or not response.all():
        return None  # some channel follows no row
    for bit in range((len(rows) - 1).bit_length()):
        marked = rows[(torch.arange(len(rows), device=rows.device) >> bit) & 1 == 1]
        response = _response(view, site, name, marked, before)
        if response is None:
            return None
        if isinstance(response, Tensor):
            numbers |= response.long() << bit
    return rows[numbers] if int(numbers.max()) < len(rows) else None


def _proportional(
    view: BlockView, site: Site, name: str, rows: Tensor, granule: int, before: _Observation
) -> Iterator[Tensor]:
    """The parts of `rows` in proportion to which channels of the site move, and nothing else of it."""
    response = _response(view, site, name, rows, before)
    if isinstance(response, Tensor):
        yield rows
    elif response is None and len(rows) > granule:
        half = len(rows) // granule // 2 * granule or granule
        for part in (rows[:half], rows[half:]):
            if len(part):
                yield from _proportional(view, site, name, part, granule, before)


_UNMOVED = object()


def _response(view: BlockView, site: Site, name: str, rows: Tensor, before: _Observation):
    """Which channels of the site double, bool `[in]`, when these rows of linear `name` do.

    _UNMOVED when none does, None when any moves otherwise, or is zero and cannot tell.
    """
    module = view.block.get_submodule(name)
    with _restored(view.block, [name]):
        for part in ("weight", "bias"):
            if getattr(module, part, None) is not None:
                changed = getattr(module, part).detach().clone()
                changed[rows] *= 2
                assign(view.block, f"{name}.{part}", changed)
        after = _observe(view).inputs[site].flatten(0, -2)
    expected = before.inputs[site].flatten(0, -2)
    doubled = (after * expected).sum(0) > 1.5 * expected.square().sum(0)
    if not expected.any(0).all() or not _alike(after, expected * (1 + doubled.float())):
        return None
    return doubled if doubled.any() else _UNMOVED


@contextmanager
def _restored(block: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Put the parameters of these modules back afterwards."""
    modules = [block.get_submodule(name) for name in names]
    kept = [dict(module.named_parameters(recurse=False)) for module in modules]
    try:
        yield
    finally:
        for module, parameters in zip(modules, kept, strict=True):
            for name, parameter in parameters.items():
                setattr(module, name, parameter)


def assign(block: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter of the block in place, in the dtype that it has."""
    owner, _, leaf = name.rpartition(".")
    module = block.get_submodule(owner)
    dtype = getattr(module, leaf).dtype
    setattr(module, leaf, nn.Parameter(tensor.detach().to(dtype), requires_grad=False))
