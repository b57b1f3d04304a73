"""Columns of linears are scaled before rounding, and what produces their inputs divided by as much.

Which of a linear's columns count, and so what a scale is worth, is a `Score`: AWQ's (`awq`), that of error
feedback (`feedback`), or that of inputs which are rounded, too (`smooth`). All else is here.

Where several sites read one producer, as a router, all experts and a shared one read the norm before them,
they share a scale, and their losses add up, weighted by tokens. Experts count with the second moments of what
enters their layer, one matrix for all, and of many rows an even sample is searched: 128 experts cost no more
than a dense layer. A router stays in 16 bit, and its columns are rounded to them once more.

Experts that are not in memory are read for that sample, one after another. Their columns are scaled later, as
is what is inside them, when each comes into memory to be quantized (`Later`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.grids.parallel import elements_at_once
from quantkit.models.machine import expert_share
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import SiteStatistics, row_losses
from quantkit.quantize.transforms import BlockView, Transformed, expert_folds
from quantkit.quantize.transforms.fold import Fold, Producer, along, divided, find_folds
from quantkit.quantize.transforms.probe import assign, in_float32, probing

ROWS = 512  # rows looked at together, at least
SEARCHED = 4096  # rows that a transform looks at where several sites share a scale
UNFOLDED = "nothing to fold scales into: kept at 1"


class Score(Protocol):
    """What a scale is worth, and which are tried. needs, sample: see `Transform`. rounds: whether rounding
    every linear as it is, to nearest, is measured, too."""

    needs: frozenset[str]
    sample: float = 1.0
    rounds: bool = False

    def rounded_on(self, grid: Grid) -> Grid:
        """What candidates are rounded on."""
        return grid.plain()

    def enough(self, producer: nn.Module) -> float:
        """The share of the loss as it is that a scale has to stay below."""
        return 1.0

    def losses(self, readers: Sequence[Reader]) -> Losses:
        """What these lose, by scale."""
        return Losses(readers)

    def search(
        self, losses: Losses, producer: Producer, entering: Sequence[tuple[SiteStatistics, float]]
    ) -> Tensor | None:
        """The scale `[in]` of least loss, None where none is best. entering: what enters, and its share of
        all tokens."""


@dataclass(frozen=True)
class ColumnScaling:
    """See `Transform`. score: of the scales."""

    score: Score

    @property
    def needs(self) -> frozenset[str]:
        return self.score.needs

    @property
    def sample(self) -> float:
        return self.score.sample

    def apply(self, view: BlockView) -> Transformed:
        """Scale every site that gains by it; one without a foldable producer stays as it is, and says so."""
        here = {site for site in view.statistics if site.linears and not view.is_away(site)}
        result = Transformed({site: view.statistics[site] for site in view.statistics if site in here})
        with in_float32(view, result.changed):
            with probing(view) as probe:
                entering, folds = probe.run().inputs, find_folds(probe)
            later = Later(self, entering, {site for fold in folds for site in fold.sites})
            columns = self._rewrite(view, here, later, folds, result)
        return replace(result, pending=frozenset(columns), expert=partial(later.expert, columns))

    def _rewrite(
        self,
        view: BlockView,
        sites: Collection[Site],
        later: Later,
        folds: Sequence[Fold],
        result: Transformed,
    ) -> dict[str, Tensor]:
        """Scale what gains by it of these folds, and inside experts that are here; note which of `sites` are
        left without any. Returns the scales of columns of linears that are away."""
        here = replace(
            view, statistics={site: view.statistics[site] for site in view.statistics if site in sites}
        )
        experts = list(expert_folds.experts(here, later.entering, later.folded, later.known))
        hidden = {site for expert in experts for site in expert.sites}
        self._leave(here, [site for site in here.statistics if site not in later.folded | hidden], result)
        columns: dict[str, Tensor] = {}
        for fold in folds:
            columns |= self._scale(view, fold, result)
        for expert in experts:
            inner = Transformed(dict(expert.view.statistics))
            found = expert.find_folds()
            own = {site for fold in found for site in fold.sites}
            self._leave(expert.view, [site for site in expert.view.statistics if site not in own], inner)
            for fold in found:
                self._scale(expert.view, fold, inner)
            expert.tell(inner, result)
        return columns

    def _scale(self, view: BlockView, fold: Fold, result: Transformed) -> dict[str, Tensor]:
        """Search the scale of a fold and fold it. Returns those of columns of linears that are away."""
        sites = [site for site in fold.sites if site in view.statistics]
        here = [site for site in sites if not view.is_away(site)]
        if not sites or (self.sample < 1 and any(site.pool for site in fold.sites)):
            return {}
        measured = [self._rounded(view, site, result) for site in here if self.score.rounds]
        entering = _entering(view, sites)
        alone = measured[-1] if len(fold.sites) == 1 and measured else None
        losses = alone or self.score.losses(_sampled(view, sites, entering, self.score.rounded_on))
        before, total = sum(losses.plain), sum(part.tokens for part in entering.values()) or 1
        shares = [(part, part.tokens / total) for part in entering.values()]
        scale = self.score.search(losses, fold.producer, shares)
        if scale is None:
            return {}
        scale, new = divided(view, fold.producer, scale)
        after = losses.of(scale, limit=float(before))
        if not after < self.score.enough(view.block.get_submodule(fold.producer.name)) * before:
            return {}
        names = [name for site in sites for name in _quantized(view, site)]
        spread = (scale.max() / scale.min()).item()
        scaled = {"into": fold.producer.name, "spread": spread, "loss": after / float(before)}
        result.scaled.update(dict.fromkeys(names, scaled))
        for name, tensor in new.items():
            assign(view.block, name, tensor)
        producer, factor = fold.producer.name, fold.producer.factor(view.block, scale)
        result.row_factors[producer] = factor * result.row_factors.get(producer, 1)
        away = {f"{name}.weight" for name in view.away}
        columns = {name: axis for name, axis in fold.columns.items() if name not in away}
        for name, axis in columns.items():
            assign(view.block, name, along(view.block.get_parameter(name), scale, axis))
        result.changed.update(new, columns)
        for site in here:
            result.statistics[site] = view.statistics[site].divided(scale)
            result.divided_by[site] = scale
        return {name.removesuffix(".weight"): scale for name in fold.columns if name in away}

    def _rounded(self, view: BlockView, site: Site, result: Transformed) -> Losses:
        """A site's losses; the errors of rounding its linears as they are go into `result`."""
        readers = _readers(view, site)
        losses = self.score.losses(readers)
        for name, reader, loss in zip(_quantized(view, site), readers, losses.plain, strict=True):
            full = row_losses(reader.weight, reader.hessian).sum().clamp(min=1e-30)
            result.rtn_errors[name] = (loss / full).item()
        return losses

    def _leave(self, view: BlockView, sites: Sequence[Site], result: Transformed) -> None:
        """Note that these sites have nothing to fold scales into."""
        for site in sites:
            names = _quantized(view, site)
            if self.score.rounds:
                self._rounded(view, site, result)
                result.notes.update(dict.fromkeys(names, (UNFOLDED,)))
            else:
                result.scaled.update({name: {"into": None} for name in names})


@dataclass(frozen=True)
class Later:
    """What is known of a block when one of its experts comes into memory. entering: a few tokens by place;
    folded: sites whose scale is shared; known: producers inside experts, by layer."""

    transform: ColumnScaling
    entering: Mapping[str, Tensor]
    folded: Collection[Site]
    known: dict[str, list[list[Producer]]] = field(default_factory=dict)

    def expert(self, columns: Mapping[str, Tensor], view: BlockView, linears: Sequence[str]) -> Transformed:
        """Multiply the columns of an expert's `linears` and scale what is inside it."""
        result = Transformed(dict(view.statistics))
        layer = expert_share.expert_of(linears[0]).rpartition(".")[0]
        shared = [name for name, _ in view.block.get_submodule(layer).named_children() if not name.isdigit()]
        with in_float32(view, result.changed, [*linears, *(f"{layer}.{name}" for name in shared)]):
            for site in view.statistics:
                if site in self.folded and self.transform.score.rounds:
                    self.transform._rounded(view, site, result)
            for name in linears:
                if name in columns:
                    weight = view.block.get_submodule(name).weight
                    assign(view.block, f"{name}.weight", along(weight, columns[name], -1))
                    result.changed.add(f"{name}.weight")
            for site, statistics in view.statistics.items():
                if site.linears[0] in columns:
                    result.statistics[site] = statistics.divided(columns[site.linears[0]])
            self.transform._rewrite(view, view.statistics, self, (), result)
        return result


def _quantized(view: BlockView, site: Site) -> list[str]:
    return [name for name in site.linears if view.grids[name]]


def _readers(view: BlockView, site: Site) -> list[Reader]:
    """All rows that read at a site."""
    hessian = view.statistics[site].hessian
    weights = {name: view.block.get_submodule(name).weight for name in _quantized(view, site)}
    return [Reader(part, view.grids[name].plain(), hessian) for name, part in weights.items()]


def _entering(view: BlockView, sites: Sequence[Site]) -> dict[Site, SiteStatistics]:
    """What enters sites, of experts what enters their layer."""
    return {place: view.statistics[place] for place in map(_place, sites)}


def _place(site: Site) -> Site:
    return Site((), site.pool) if site.pool else site


def _sampled(
    view: BlockView,
    sites: Sequence[Site],
    entering: Mapping[Site, SiteStatistics],
    rounded_on: Callable[[Grid], Grid] = Grid.plain,
) -> list[Reader]:
    """An even sample of the rows that read at several sites, each counted by the tokens that reach it."""
    names = [(site, name) for site in sites for name in _quantized(view, site)]
    step = math.ceil(sum(len(view.block.get_submodule(name).weight) for _, name in names) / SEARCHED)
    total = max(statistics.tokens for statistics in entering.values()) or 1
    alike: dict[tuple[Site, Grid], list[tuple[Site, str]]] = {}  # rounded together
    for site, name in names:
        alike.setdefault((_place(site), rounded_on(view.grids[name])), []).append((site, name))
    readers = []
    for (place, grid), found in alike.items():
        hessian = entering[place].hessian
        counts = [len(range(0, view.block.get_submodule(name).out_features, step)) for _, name in found]
        shares = [view.statistics[site].tokens / total for site, _ in found]
        weight = hessian.new_empty(
            sum(counts), len(hessian)
        )  # small copies would leave holes between experts
        share = torch.cat([weight.new_full((n,), part) for n, part in zip(counts, shares, strict=True)])
        for (_, name), part in zip(found, weight.split(counts), strict=True):
            part.copy_(view.linear(name).weight[::step])
        readers.append(Reader(weight, grid, hessian, share, entering[place].inputs))
    return readers


@dataclass(frozen=True)
class Reader:
    """weight: `[out, in]` float32. hessian: of what enters. share: what each row counts, `[out]`; None: 1.
    inputs: a few of them, `[few, in]`, where a transform needs such."""

    weight: Tensor
    grid: Grid
    hessian: Tensor
    share: Tensor | None = None
    inputs: Tensor | None = None

    def split(self, rows: int) -> list[Reader]:
        """So many rows in each."""
        parts = self.weight.split(rows)
        shares = [None] * len(parts) if self.share is None else self.share.split(rows)
        return [replace(self, weight=part, share=share) for part, share in zip(parts, shares, strict=True)]

    def loss(self, scale: Tensor | None) -> Tensor:
        """`tr(dW H dWᵀ)` under a scale `[in]`, or without."""
        scaled = self.weight.clone() if scale is None else self.weight * scale
        groups = scaled.view(-1, self.grid.group_size)
        values = self.grid.nearest(groups, self.grid.fit(groups)).view(self.weight.shape)
        delta = (values if scale is None else values.div_(scale)).sub_(self.weight)
        return self.counted(row_losses(delta, self.hessian))

    def every(self, step: int) -> Reader:
        """Every `step`-th row."""
        return replace(
            self, weight=self.weight[::step], share=None if self.share is None else self.share[::step]
        )

    def counted(self, rows: Tensor) -> Tensor:
        """The sum of what rows lose, `[out]`, each counted as it does."""
        return (rows if self.share is None else rows * self.share).sum()


class Losses:
    """`tr(dW H dWᵀ)` of linears under scales of their inputs, `dW = Q(W s) / s - W`, added up.

    plain: the loss of each as it is, without a scale. Groups are fitted one by one, also where they depend on
    one another (double quantization).
    Rows lose independently and never less than nothing, so a scale is given up once the rows looked at
    have lost more than a limit: those that lose most come first.
    """

    def __init__(self, readers: Sequence[Reader]):
        self.readers = readers
        self.plain: list[Tensor] = []
        lost: list[tuple[float, Reader]] = []
        for reader in readers:
            weight = reader.weight
            parts = reader.split(max(ROWS, elements_at_once(weight.device) // weight.shape[1]))
            found = [part.loss(None) for part in parts]
            self.plain.append(sum(found))
            lost += ((loss.item(), part) for loss, part in zip(found, parts, strict=True))
        self._parts = [part for _, part in sorted(lost, key=lambda pair: -pair[0])]

    def of(self, scale: Tensor, limit: float = math.inf) -> float:
        """The loss of all linears under `scale [in]`; anything above `limit` if it is above that."""
        total = 0.0
        for part in self._parts:
            total += part.loss(scale).item()
            if total > limit:
                break
        return total


def in_few_digits(scale: Tensor) -> Tensor:
    """A scale `[in]`, its largest and smallest value each other's inverse, so that it is the same wherever
    sums are added in another order."""
    return (scale / (scale.max() * scale.min()).sqrt()).bfloat16().float()


def sample_step(readers: Sequence[Reader], rows: int) -> int:
    """Which rows to look at, every so many, for `rows` in all."""
    return -(-sum(len(reader.weight) for reader in readers) // rows)
