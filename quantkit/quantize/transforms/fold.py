"""Folds: scales that the producer of a linear's inputs can absorb, proven by experiments on the block.

The inputs of linears can be divided by s, and their columns multiplied by s, if the producer of the inputs
can be divided by s: a norm's weight, or rows of another linear (v for o through attention, up for down, fc1
for fc2 through ReLU). A guess is tried with random powers of two, which cause no rounding. The producer is
divided, and all readers of divided inputs are multiplied: linears, all experts of a layer, a router that is
no linear. If no other inputs and not the block's output have changed, the scales can be folded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import BlockView
from quantkit.quantize.transforms.probe import Observation, Probe, assign, equal, probing


@dataclass(frozen=True)
class Producer:
    """A module that can absorb scales. name: in the block. rows: int64 `[in]`, the row of its weight that
    produces each channel of the readers; grouped heads share rows. one_plus: its weight acts as 1 + w."""

    name: str
    rows: Tensor
    one_plus: bool = False

    def tied(self, channels: Tensor) -> Tensor:
        """Return `channels [in]`, each replaced by the mean over the channels that share its row.

        Computed on the host, because sums on CUDA vary from run to run and a job must write the same bytes.
        """
        rows, values = self.rows.cpu(), channels.cpu()
        count = int(rows.max()) + 1
        sums = values.new_zeros(count).index_add_(0, rows, values)
        return (sums / torch.bincount(rows, minlength=count).clamp(min=1))[rows].to(channels.device)

    def storable(self, view: BlockView, scale: Tensor) -> Tensor:
        """Return the scale `[in]` that the stored weight really has if it is divided by `scale`: that of a
        norm in 16 bit is `w / w_stored`. Rows of a linear have no single factor after rounding: they are
        quantized, or lose the precision of 16 bit."""
        weight = view.block.get_submodule(self.name).weight
        if weight.ndim > 1:
            return scale
        extra = 1.0 if self.one_plus else 0.0
        acting = weight.float() + extra
        exact = acting / (view.stored(f"{self.name}.weight", acting / scale - extra).float() + extra)
        return torch.where(torch.isfinite(exact) & (exact > 0), exact, 1.0)

    def factor(self, block: nn.Module, scale: Tensor) -> Tensor:
        """Return the factors of the weight's rows, `[rows]`, that divide its outputs by `scale [in]`."""
        rows = len(block.get_submodule(self.name).weight)
        factor = torch.ones(rows, dtype=torch.float32, device=scale.device)
        factor[self.rows] = 1 / scale
        return factor

    def divided(self, block: nn.Module, scale: Tensor) -> dict[str, Tensor]:
        """Return the producer's new parameters, float32, by name in the block: its outputs are divided by
        `scale [in]`. Channels that share a row must have the same scale."""
        module = block.get_submodule(self.name)
        factor = self.factor(block, scale)
        weight = module.weight.float()
        if weight.ndim == 2:
            weight = weight * factor[:, None]
        else:
            weight = (1 + weight) * factor - 1 if self.one_plus else weight * factor
        parameters = {f"{self.name}.weight": weight}
        if getattr(module, "bias", None) is not None:
            parameters[f"{self.name}.bias"] = module.bias.float() * factor
        return parameters


@dataclass(frozen=True)
class Fold:
    """A producer and all its readers. columns: names of parameters whose last axis is multiplied: weights of
    `sites`, and matrices that are not linears."""

    producer: Producer
    sites: tuple[Site, ...]
    columns: tuple[str, ...]


def find_folds(probe: Probe, candidates: Callable[..., Iterator[Producer]] | None = None) -> list[Fold]:
    """Return folds; each site is in at most one. candidates: yields producers instead of `guesses`.

    Folds of other blocks are not reused, because a resumed job would not know them.
    """
    before, folds = probe.run(), []
    for place, (site, *_) in probe.readers.items():
        if place not in before.inputs or any(site in fold.sites for fold in folds):
            continue
        for producer in (candidates or guesses)(probe, place, before):
            fold = prove(probe, producer, before)
            if fold is not None and site in fold.sites:
                folds.append(fold)
                break
    return folds


def find_in_expert(view: BlockView, known: dict[str, list[Producer]]) -> list[Fold]:
    """Return the folds inside the expert of a view, which affect nothing else in its layer. Experts of a
    layer have equal modules, so the producers of the first expert are the candidates for all others, and are
    proven there. known: these producers by layer, with names inside the expert."""
    layer, prefix = view.expert.rpartition(".")[0], f"{view.expert}."
    with probing(view) as probe:
        if layer in known:
            candidates = [replace(each, name=prefix + each.name) for each in known[layer]]
            return find_folds(probe, lambda *_: iter(candidates))
        folds = find_folds(probe)
    producers = (fold.producer for fold in folds)
    known[layer] = [replace(each, name=each.name.removeprefix(prefix)) for each in producers]
    return folds


def guesses(probe: Probe, place: str, before: Observation) -> Iterator[Producer]:
    """Yield producers, likely ones first: norms, linears of equal width, then parts of other linears."""
    width, device = before.inputs[place].shape[-1], before.output.device
    identity = torch.arange(width, device=device)
    reading = {name for site in probe.readers[place] for name in site.linears}
    modules = [
        (name, module)
        for name, module in probe.modules().items()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and name not in reading
    ]
    for name, module in modules:
        if module.weight.shape == (width,):
            yield Producer(name, identity)
            yield Producer(name, identity, one_plus=True)
    linears = [(name, module) for name, module in modules if isinstance(module, nn.Linear)]
    for name, module in linears:
        if module.out_features == width:
            yield Producer(name, identity)
    followed = [Following(probe, place, name, before) for name, _ in linears]
    # probe each linear once before the costly search: v and up are whole; q, k and gate take hundreds of runs
    for following in sorted(followed, key=lambda each: each.whole is None or not each.whole.any()):
        rows = following.rows()
        if rows is not None:
            yield Producer(following.name, rows)


def prove(probe: Probe, producer: Producer, before: Observation) -> Fold | None:
    """Return a producer's fold, tried with random scales; None if the readers cannot compensate for them."""
    generator = torch.Generator().manual_seed(len(producer.rows))
    exponents = torch.randint(-1, 2, (int(producer.rows.max()) + 1,), generator=generator)
    scale = torch.exp2(exponents.to(producer.rows.device).float())[producer.rows]
    places: list[str] = []
    columns: list[str] = []
    with probe.restored():
        for name, tensor in producer.divided(probe.block, scale).items():
            assign(probe.block, name, tensor)
        while True:
            after = probe.run()
            new = [
                place
                for place, inputs in before.inputs.items()
                if place not in places and _divided(after.inputs.get(place), inputs, scale)
            ]
            for place in new:
                probe.multiply(place, scale)
                columns += probe.columns(place)
            places += new
            matrices = [] if new else _compensated(probe, before, after, scale)
            columns += matrices
            if not new and not matrices:
                break
    if places and _unchanged(after, before, places, scale):
        sites = tuple(site for place in places for site in probe.readers[place])
        return Fold(producer, sites, tuple(columns))
    return None


def _divided(after: Tensor | None, before: Tensor, scale: Tensor) -> bool:
    """Return whether `after` is `before` divided by `scale [in]`."""
    if after is None or before.shape[-1:] != scale.shape or after.shape != before.shape:
        return False
    return bool(before.any()) and equal(after.float() * scale, before.float())


def _compensated(probe: Probe, before: Observation, after: Observation, scale: Tensor) -> list[str]:
    """Multiply the last axis of the matrices of a module with divided inputs. Returns their names if the
    module's outputs are then the same as before, else []. Modules with unchanged outputs are skipped."""
    for name, leaves in probe.matrices.items():
        entered = before.entered.get(name)
        if entered is None or not _divided(after.entered.get(name), entered, scale):
            continue
        if _all_equal(after.left[name], before.left[name]):
            continue
        names = [f"{name}.{leaf}" if name else leaf for leaf in leaves]
        kept = {full: probe.block.get_parameter(full) for full in names}
        kept = {full: tensor for full, tensor in kept.items() if tensor.shape[-1] == len(scale)}
        for full, tensor in kept.items():
            assign(probe.block, full, tensor * scale)
        if kept and _all_equal(probe.run().left[name], before.left[name]):
            return list(kept)
        for full, tensor in kept.items():
            assign(probe.block, full, tensor)
    return []


def _unchanged(after: Observation, before: Observation, places: list[str], scale: Tensor) -> bool:
    """Return whether nothing changed except for divided inputs at `places`."""
    if after.inputs.keys() != before.inputs.keys() or after.left.keys() != before.left.keys():
        return False
    for place, inputs in before.inputs.items():
        now = after.inputs[place]
        if not (_divided(now, inputs, scale) if place in places else equal(now, inputs)):
            return False
    if not all(_all_equal(after.left[name], left) for name, left in before.left.items()):
        return False
    return equal(after.output, before.output)


def _all_equal(after: list[Tensor], before: list[Tensor]) -> bool:
    return len(after) == len(before) and all(map(equal, after, before))


GRANULES = 16, 64  # rows of a fused linear tried together, up to LARGE and beyond: heads are multiples
LARGE = 4096


@dataclass(frozen=True)
class Following:
    """How the inputs at `place` respond to changed rows of linear `name`. before: without changes."""

    probe: Probe
    place: str
    name: str
    before: Observation

    def rows(self) -> Tensor | None:
        """Return the row to which each input channel is proportional, `[in]`; None if a channel has none.

        Rows that affect single channels are found by halving. Then the row number of each channel is read bit
        by bit: if all rows whose number has bit k are doubled, their channels double.
        """
        out_features = self.probe.block.get_submodule(self.name).out_features
        granule = math.gcd(out_features, GRANULES[out_features > LARGE])
        if self.whole is not None and not self.whole.any():
            return None
        everything = torch.arange(out_features, device=self.before.output.device)
        rows = torch.cat(list(self._proportional(everything, granule)) or [everything[:0]])
        if not len(rows):
            return None
        numbers = torch.zeros(self._entering.shape[-1], dtype=torch.long, device=rows.device)
        response = self._response(rows)
        if response is None or not response.all():
            return None  # some channel follows no row
        for bit in range((len(rows) - 1).bit_length()):
            marked = rows[(torch.arange(len(rows), device=rows.device) >> bit) & 1 == 1]
            response = self._response(marked)
            if response is None:
                return None
            numbers |= response.long() << bit
        return rows[numbers] if int(numbers.max()) < len(rows) else None

    @cached_property
    def whole(self) -> Tensor | None:
        """Response to doubling the linear's whole output."""
        out_features = self.probe.block.get_submodule(self.name).out_features
        return self._response(torch.arange(out_features, device=self.before.output.device))

    @property
    def _entering(self) -> Tensor:
        return self.before.inputs[self.place]

    def _proportional(self, rows: Tensor, granule: int) -> Iterator[Tensor]:
        """Yield the parts of `rows` to which some channels are proportional."""
        response = self._response(rows)
        if response is not None and response.any():
            yield rows
        elif response is None and len(rows) > granule:
            middle = len(rows) // granule // 2 * granule or granule
            for half in (rows[:middle], rows[middle:]):
                if len(half):
                    yield from self._proportional(half, granule)

    def _response(self, rows: Tensor) -> Tensor | None:
        """Return which channels double if these rows double, bool `[in]`; None if a channel is zero or
        changes in another way."""
        after = self.probe.entering(self.place, self.name, rows)
        if after.shape != self._entering.shape:
            return None  # tokens were routed otherwise
        after, expected = after.flatten(0, -2), self._entering.flatten(0, -2)
        doubled = (after * expected).sum(0) > 1.5 * expected.square().sum(0)
        whole = expected.any(0).all() and equal(after, expected * (1 + doubled.float()))
        return doubled if whole else None
