"""Scale columns of linears before rounding, and divide the producer of their inputs by the scale.

A `ColumnScaling` defines a loss under a scale and a search for the best scale: for AWQ (`awq`), for error
feedback (`auto`), or for rounded inputs (`smooth`).

Sites with the same producer share a scale, such as a router, all experts and a shared expert after a norm;
their losses are added, weighted by tokens. All experts use the second moments of their layer's inputs, and if
they have many rows, an even sample is searched: 128 experts cost no more than a dense layer. A router stays
in 16 bit, and its scaled columns are rounded to 16 bit.

Experts that are not in memory are read for the sample, one after another. Their columns and inner producers
are scaled when they are loaded to be quantized (`Later`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.grids.grid import Grid
from quantkit.grids.parallel import rows_at_once
from quantkit.layouts import Statistic
from quantkit.models.machine import expert_share
from quantkit.quantize.calibrate.sites import Block, Site
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.calibrate.view import BlockView, Transformed
from quantkit.quantize.solvers import measured, row_losses
from quantkit.quantize.transforms.fold import Fold, Producer, find_folds, find_in_expert
from quantkit.quantize.transforms.probe import assign, in_float32, probing

SCALED_ROWS = 512  # rows looked at together, at least
SEARCHED = 4096  # rows that a transform looks at where several sites share a scale
UNFOLDED = "nothing to fold scales into: kept at 1"
Entering = Sequence[tuple[SiteStatistics, float]]  # statistics of a fold's inputs, and shares of all tokens


class ColumnScaling:
    """The transform of every block before its sites are solved, and of each streamed expert before the
    expert's sites are solved. A subclass defines the loss and the candidate scales.

    needs: statistics of every site. sample: share of the calibration tokens by which scales are chosen; below
    1 experts are not scaled, and afterwards all sites are measured in order with all tokens. rounds: also
    measure the error of rounding the unscaled linears to nearest. rows: how many rows of a fold are used;
    None: all. plain: round candidates on the grid without search. enough: a scale is used if its loss is
    below this share of the unscaled loss; by number of dimensions of the producer's weight.
    """

    needs: frozenset[Statistic]
    sample: float = 1.0
    rounds: bool = False
    rows: int | None = None
    plain: bool = True
    enough: Mapping[int, float] = {1: 1.0, 2: 1.0}

    def may_help(self, block: Block) -> bool:
        """Return whether a scale may lower the loss of a block, judged by its weights alone."""
        return bool(block.around)

    def reader(self, reader: Reader) -> Reader:
        """Return a reader with the loss of this transform."""
        return reader

    def losses(self, readers: Sequence[Reader]) -> Losses:
        """Return the losses of these readers, computed on an even sample of their rows."""
        step = math.ceil(sum(len(reader.weight) for reader in readers) / self.rows) if self.rows else 1
        return Losses([self.reader(reader.rows(slice(None, None, step))) for reader in readers])

    def search(self, losses: Losses, producer: Producer, entering: Entering) -> Tensor | None:
        """Return the scale `[in]` with the least loss; None if no scale is best."""
        raise NotImplementedError

    def apply(self, view: BlockView) -> Transformed:
        """Scale every site whose loss falls; sites without a foldable producer get a note."""
        here = (site for site in view.statistics if site.linears and not view.is_away(site))
        result = Transformed({site: view.statistics[site] for site in here})
        with in_float32(view, result.changed):
            with probing(view) as probe:
                entering, folds = probe.run().inputs, find_folds(probe)
            later = Later(self, entering, {site for fold in folds for site in fold.sites})
            columns = self._rewrite(view, later, folds, result)
        return replace(result, pending=frozenset(columns), expert=partial(later.expert, columns))

    def _rewrite(
        self, view: BlockView, later: Later, folds: Sequence[Fold], result: Transformed
    ) -> dict[str, Tensor]:
        """Scale the folds whose loss falls, also inside experts in memory; note which sites of `result` have
        no fold. Returns the column scales of linears that are not in memory."""
        here = replace(view, statistics=dict(result.statistics))
        experts = list(here.experts(later.entering, later.folded))
        inside = {site for expert in experts for site in expert.sites}
        self._leave(here, [site for site in here.statistics if site not in later.folded | inside], result)
        columns: dict[str, Tensor] = {}
        for fold in folds:
            columns |= self._scale(view, fold, result)
        for expert in experts:
            inner_folds = find_in_expert(expert, later.known)
            folded = {site for fold in inner_folds for site in fold.sites}
            self._leave(expert, [site for site in expert.sites if site not in folded], result)
            for fold in inner_folds:
                self._scale(expert, fold, result)
        return columns

    def _scale(self, view: BlockView, fold: Fold, result: Transformed) -> dict[str, Tensor]:
        """Search the scale of a fold. If it lowers the loss, divide the producer by it and multiply the
        columns that read the producer. Returns the column scales of linears that are not in memory."""
        sites = [site for site in fold.sites if site in view.statistics]
        if not sites or (self.sample < 1 and any(site.pool for site in fold.sites)):
            return {}
        here = [site for site in sites if not view.is_away(site)]
        rounded = [self._rounded(view, site, result) for site in here if self.rounds]
        entering = {site: view.statistics[site] for site in map(view.shared, sites)}  # experts': the layer's
        if rounded and len(fold.sites) == 1:
            losses = rounded[0]
        else:
            losses = self.losses(_sampled(view, sites, entering, self.plain))
        total = sum(statistics.tokens for statistics in entering.values()) or 1
        shares = [(statistics, statistics.tokens / total) for statistics in entering.values()]
        scale = self.search(losses, fold.producer, shares)
        if scale is None:
            return {}
        producer, scale = fold.producer.name, fold.producer.storable(view, scale)
        before = sum(losses.plain)
        after = losses.of(scale, limit=float(before))
        if not after < self.enough[view.block.get_submodule(producer).weight.ndim] * before:
            return {}
        spread = (scale.max() / scale.min()).item()
        scaled = {"into": producer, "spread": spread, "loss": after / float(before)}
        for name in (name for site in sites for name in _quantized(view, site)):
            result.report(name, scaled=scaled)
        divided = fold.producer.divided(view.block, scale)
        for name, tensor in divided.items():
            assign(view.block, name, tensor)
        factor = fold.producer.factor(view.block, scale)
        result.row_factors[producer] = factor * result.row_factors.get(producer, 1)
        away = {f"{name}.weight" for name in view.away}
        columns = [name for name in fold.columns if name not in away]
        for name in columns:
            assign(view.block, name, view.block.get_parameter(name).float() * scale)
        result.changed.update(divided, columns)
        for site in here:
            result.statistics[site] = view.statistics[site].divided(scale)
            result.divided_by[site] = scale
        return {name.removesuffix(".weight"): scale for name in fold.columns if name in away}

    def _rounded(self, view: BlockView, site: Site, result: Transformed) -> Losses:
        """Return a site's losses; add the errors of rounding its unscaled linears to `result`."""
        readers = _readers(view, site)
        losses = self.losses(readers)
        for name, reader, loss in zip(_quantized(view, site), readers, losses.plain, strict=True):
            full = reader.counted(row_losses(reader.weight, reader.hessian)).clamp(min=1e-30)
            result.report(name, rtn_error=(loss / full).item())
        return losses

    def _leave(self, view: BlockView, sites: Sequence[Site], result: Transformed) -> None:
        """Note that these sites are not scaled because no producer can absorb a scale."""
        for site in sites:
            facts = {"notes": (UNFOLDED,)} if self.rounds else {"scaled": {"into": None}}
            if self.rounds:
                self._rounded(view, site, result)
            for name in _quantized(view, site):
                result.report(name, **facts)


@dataclass(frozen=True)
class Later:
    """The part of a transform that is done when experts are loaded. entering: a few tokens for each layer.
    folded: sites with a shared scale. known: producers inside experts, by layer."""

    transform: ColumnScaling
    entering: Mapping[str, Tensor]
    folded: Collection[Site]
    known: dict[str, list[Producer]] = field(default_factory=dict)

    def expert(self, columns: Mapping[str, Tensor], view: BlockView, linears: Sequence[str]) -> Transformed:
        """Scale the columns of an expert's `linears`, then its inner producers; return the changes."""
        result = Transformed(dict(view.statistics))
        layer = expert_share.expert_of(linears[0]).rpartition(".")[0]
        shared = [name for name, _ in view.block.get_submodule(layer).named_children() if not name.isdigit()]
        with in_float32(view, result.changed, [*linears, *(f"{layer}.{name}" for name in shared)]):
            for site in view.statistics:
                if site in self.folded and self.transform.rounds:
                    self.transform._rounded(view, site, result)
            for name in linears:
                if name in columns:
                    weight = view.block.get_submodule(name).weight
                    assign(view.block, f"{name}.weight", weight.float() * columns[name])
                    result.changed.add(f"{name}.weight")
            for site, statistics in view.statistics.items():
                if site.linears[0] in columns:
                    result.statistics[site] = statistics.divided(columns[site.linears[0]])
            self.transform._rewrite(view, self, (), result)
        return result


def _quantized(view: BlockView, site: Site) -> list[str]:
    return [name for name in site.linears if view.grids[name]]


def _readers(view: BlockView, site: Site) -> list[Reader]:
    """Return a reader of an even sample of rows for each quantized linear of a site."""
    hessian, readers = view.statistics[site].hessian, []
    for name in _quantized(view, site):
        weight = view.block.get_submodule(name).weight
        sample = weight[measured(len(weight))]
        share = sample.new_full((len(sample),), len(weight) / len(sample))
        readers.append(Reader(sample, view.grids[name].plain(), hessian, share))
    return readers


def _sampled(
    view: BlockView, sites: Sequence[Site], entering: Mapping[Site, SiteStatistics], plain: bool
) -> list[Reader]:
    """Return readers for an even sample of the rows of several sites, weighted by the sites' tokens."""
    names = [(site, name) for site in sites for name in _quantized(view, site)]
    step = math.ceil(sum(len(view.block.get_submodule(name).weight) for _, name in names) / SEARCHED)
    total = max(statistics.tokens for statistics in entering.values()) or 1
    by_grid: dict[tuple[Site, Grid], list[tuple[Site, str]]] = {}  # rounded together
    for site, name in names:
        grid = view.grids[name].plain() if plain else view.grids[name]
        by_grid.setdefault((view.shared(site), grid), []).append((site, name))
    readers = []
    for (layer, grid), linears in by_grid.items():
        hessian = entering[layer].hessian
        counts = [len(range(0, view.block.get_submodule(name).out_features, step)) for _, name in linears]
        shares = [view.statistics[site].tokens / total for site, _ in linears]
        # one tensor, because small copies would leave holes between experts
        weight = hessian.new_empty(sum(counts), len(hessian))
        share = torch.cat([weight.new_full((n,), value) for n, value in zip(counts, shares, strict=True)])
        for (_, name), sample in zip(linears, weight.split(counts), strict=True):
            sample.copy_(view.read(name).weight[::step])
        readers.append(Reader(weight, grid, hessian, share, entering[layer].get(Statistic.INPUTS)))
    return readers


@dataclass(frozen=True)
class Reader:
    """Rows that read a site's inputs. weight: `[out, in]` float32. hessian: of the inputs. share: weight of
    each row in the loss, `[out]`. inputs: `[few, in]`, if the transform needs any."""

    weight: Tensor
    grid: Grid
    hessian: Tensor
    share: Tensor
    inputs: Tensor | None = None

    def loss(self, scale: Tensor) -> Tensor:
        """Return `tr(dW H dWᵀ)` under a scale `[in]`."""
        groups = (self.weight * scale).view(-1, self.grid.group_size)
        values = self.grid.nearest(groups, self.grid.fit(groups)).view(self.weight.shape)
        return self.counted(row_losses(values.div_(scale).sub_(self.weight), self.hessian))

    def rows(self, rows: slice) -> Reader:
        """Return a reader of some rows."""
        return replace(self, weight=self.weight[rows], share=self.share[rows])

    def counted(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of row losses `[out]`."""
        return (rows * self.share).sum()


class Losses:
    """The sum of `tr(dW H dWᵀ)` over linears under a scale of their inputs, with `dW = Q(W s) / s - W`.

    plain: each linear's loss without a scale. Groups are fitted one by one, also with double quantization.
    Row losses are independent and never negative, so a scale is given up once its loss exceeds a limit; rows
    with the largest loss come first.
    """

    def __init__(self, readers: Sequence[Reader]):
        self.readers = readers
        self.plain: list[Tensor] = []
        losses: list[tuple[float, Reader]] = []
        for reader in readers:
            rows, width = reader.weight.shape
            size = max(SCALED_ROWS, rows_at_once(reader.weight.device, width))
            chunks = [reader.rows(slice(start, start + size)) for start in range(0, rows, size)]
            plain = [chunk.loss(reader.weight.new_ones(width)) for chunk in chunks]
            self.plain.append(sum(plain))
            losses += ((loss.item(), chunk) for loss, chunk in zip(plain, chunks, strict=True))
        self._chunks = [chunk for _, chunk in sorted(losses, key=lambda pair: -pair[0])]

    def of(self, scale: Tensor, limit: float = math.inf) -> float:
        """Return the loss of all linears under `scale [in]`; if it exceeds `limit`, any value above."""
        total = 0.0
        for chunk in self._chunks:
            total += chunk.loss(scale).item()
            if total > limit:
                break
        return total
