"""Statistics of a block's sites. Each site is measured after all earlier sites are quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Literal

from torch import Tensor, nn

from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.machine.memory import return_freed_pages
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import capture
from quantkit.quantize.calibrate.capture import Statistics
from quantkit.quantize.calibrate.execution import Execution
from quantkit.quantize.calibrate.forwards import SuspendedForward, gather_together, repeated
from quantkit.quantize.calibrate.original import Original
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Site
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.calibrate.view import BlockView, Transformed
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.timings import Timings

Choice = Literal["shrink", "routed", "all"]  # the tokens that an expert's statistics come from


@dataclass(frozen=True)
class Block:
    """A loaded block. rows: its linears by name in the block. sites: in the order of a forward pass. probe:
    hidden states of a few tokens that enter the block, the same on all ranks."""

    index: int
    module: nn.Module
    rows: dict[str, LinearSpec]
    sites: list[Site]
    probe: Tensor | None = None

    @cached_property
    def chosen(self) -> list[Site]:
        """Return sites with linears to quantize, and the layer-wide sites of their experts."""
        chosen = {site for site in self.sites if any(self.rows[name].grid for name in site.linears)}
        pools = {site.pool for site in chosen}
        return [site for site in self.sites if site in chosen or (not site.linears and site.pool in pools)]

    def row(self, site: Site) -> LinearSpec:
        """Return one of the linears that read the site's inputs."""
        readers = (name for one in self.sites if one == site or one.pool == site.pool for name in one.linears)
        return self.rows[site.linears[0] if site.linears else next(readers)]


@dataclass(frozen=True)
class Measured:
    """Statistics and outputs of a block. statistics: returns those of a site; call it in order, after earlier
    sites are quantized. outputs: returns the block's outputs; call it after all sites. transformed: changes
    to the block. order: of the sites; None: of a forward pass. independent: experts can be solved in any
    order."""

    statistics: Callable[[Site], SiteStatistics | None]
    outputs: Callable[[], Iterable[Tensor]]
    close: Callable[[], None] = lambda: None
    transformed: Transformed = Transformed({})
    order: Sequence[Site] | None = None
    independent: bool = False


@dataclass(frozen=True)
class Measuring:
    """Measures a block by running `states` through it. needs: fields of SiteStatistics. choice: which tokens
    an expert's statistics use (`of_expert`). original: the original model's block, if needed. batches: number
    on all ranks; `states` has this rank's."""

    skeleton: Skeleton
    states: States
    execution: Execution
    needs: frozenset[str]
    choice: Choice
    timings: Timings
    batches: int
    original: Original | None = None

    def run(self, block: Block, most: int | None = None) -> Callable[[int], Tensor]:
        """Return a function that runs the block on batch k. most: only its first sequences."""
        if self.original:
            return partial(self.original.run, most=most)
        return lambda k: self.skeleton.run_block(block.index, self.states[k][:most])

    def outputs(self, block: Block) -> Iterator[Tensor]:
        """Yield the block's outputs with its present weights, batch by batch."""
        return self.skeleton.in_step(block.index, self.run(block), len(self.states))

    def view(self, block: Block, statistics: Mapping[Site, SiteStatistics]) -> BlockView:
        """Return the view of the block that a transform works on."""
        index, skeleton = block.index, self.skeleton
        probe = self.states[0][:1, :PROBE_TOKENS] if block.probe is None else block.probe
        return BlockView(
            block=block.module,
            sites=[site for site in block.sites if site.linears],
            statistics=statistics,
            grids={name: row.grid for name, row in block.rows.items()},
            probe=lambda: skeleton.run_block(index, probe.float()),
            stored=lambda name, tensor: tensor.to(skeleton.stored_dtype(index, name)),
            away=skeleton.away(index),
            read=partial(skeleton.part, index),
        )

    def in_order(self, block: Block) -> Measured:
        """Return statistics that measure each site after the earlier sites are quantized."""
        reached = [site for site in block.chosen if site.calls]
        repeats = self.execution.sequential == "repeat" or any(site.whole for site in reached)
        layers: dict[str, SiteStatistics] = {}
        if repeats:
            again = _Repeated(self, block)
            statistics = lambda site: self.mixed(layers, site, again.of(site))  # noqa: E731
            return Measured(statistics, again.outputs, independent=True)
        chosen = set(block.chosen)
        # experts that are kept as they are let all batches wait, too: one reading of their weights serves all
        seen = [site for site in block.sites if site.calls]
        seen = [site for site in seen if site in chosen or (site.pool and site.linears)]
        forward = SuspendedForward(block.module, seen, self.run(block), len(self.states))

        def statistics(site: Site) -> SiteStatistics:
            own = self.summed(block, site, forward.inputs(site) if site.calls else ())
            return self.mixed(layers, site, own)

        return Measured(statistics, forward.outputs, forward.close)

    def at_once(self, block: Block, sites: Sequence[Site], sample: float = 1.0) -> dict[Site, SiteStatistics]:
        """Return the statistics of all these sites with the present weights, from one forward pass. sample:
        share of the sequences, evenly spaced."""
        own = distributed.span(self.batches)
        every, sequences = range(0, self.batches, round(1 / sample)), len(self.states[0])
        sampled = sample * sequences * self.batches
        most = math.ceil(sampled / len(every))  # sequences of a batch: fewer than all where batches are few
        every = [k - own.start for k in every if k in own]
        run, whole = self.run(block, most), sample == 1
        outputs = self.skeleton.in_step(block.index, lambda k: run(every[k]), len(every))
        with self.timings("forward"):
            gathered = capture.gather(
                block.module, sites, self.needs, self.skeleton.device,
                lambda: list(map(len, outputs)),
                self.original.counterpart if whole and self.original else lambda site: None,
            )  # fmt: skip
        found = {site: self.finished(block, site, sums) for site, sums in gathered.items()}
        layers: dict[str, SiteStatistics] = {}
        return {site: self.mixed(layers, site, own) for site, own in found.items()}

    def mixed(self, layers: dict[str, SiteStatistics], site: Site, own: SiteStatistics) -> SiteStatistics:
        """Return the statistics that a site is solved with. An expert's are mixed with those of its whole
        layer; the layer's are measured first and kept in `layers`."""
        if site.linears:
            return of_expert(own, layers[site.pool], site.in_features, self.choice) if site.pool else own
        layers.clear()
        layers[site.pool] = own
        return own

    def summed(self, block: Block, site: Site, inputs: Iterable[Tensor]) -> SiteStatistics:
        """Return a site's statistics from all batches of its inputs."""
        sums = Statistics(site.in_features, self.skeleton.device, self.needs)
        for k, batch in enumerate(self.timings.waiting("forward", inputs)):
            with self.timings("hessian", wait=False):
                sums.add(batch, self.original.counterpart(site, k) if self.original else None)
        return self.finished(block, site, sums)

    def finished(self, block: Block, site: Site, sums: Statistics) -> SiteStatistics:
        """Return a site's statistics from `sums`. Raises QuantkitError if activations are not finite."""
        with self.timings("hessian"):
            statistics = sums.finish()
            return_freed_pages()  # the solver's copies are a block's peak: let them not come on top of holes
        capture.refuse_not_finite(statistics, block.row(site).name, self.execution.dtype)
        return statistics


class _Repeated:
    """Runs the block again for every site, but only once for several experts' sites that fit in memory."""

    def __init__(self, by: Measuring, block: Block):
        self._by, self._block = by, block
        self._each = lambda run, count: by.skeleton.in_step(block.index, run, count)
        self._run = by.run(block)
        self._gathered: dict[Site, Statistics] = {}
        self.outputs = partial(self._each, self._run, len(by.states))

    def of(self, site: Site) -> SiteStatistics:
        """Return a site's own statistics, without those of its layer."""
        by, block = self._by, self._block
        if not (site.pool and site.calls and not site.whole):
            place = block.module.get_submodule(site.place)
            inputs = repeated(place, self._run, len(by.states), self._each, site.whole)
            return by.summed(block, site, inputs if site.calls else ())
        if site not in self._gathered:
            with by.timings("forward"):
                self._gathered = gather_together(
                    block.module, self._together(site), by.needs, by.skeleton.device, self._run,
                    len(by.states), self._each,
                )  # fmt: skip
        return by.finished(block, site, self._gathered.pop(site))

    def _together(self, site: Site) -> Sequence[Site]:
        """Return the site and the next sites of its layer's experts, as many as fit in memory."""
        sites = self._block.chosen[self._block.chosen.index(site) :][: self._by.execution.at_once]
        return list(takewhile(lambda other: other.pool == site.pool and not other.whole, sites))


def borrowed(tokens: int, in_features: int, choice: Choice) -> float:
    """Return the weight of the layer's statistics in an expert's, between 0 and 1."""
    if choice == "all" or not tokens:
        return 1.0
    return in_features / (tokens + in_features) if choice == "shrink" else 0.0


def of_expert(own: SiteStatistics, layer: SiteStatistics, in_features: int, choice: Choice) -> SiteStatistics:
    """Return an expert's statistics, mixed with the layer's. The peak is the expert's own if it has tokens.

    The second moments of an expert's `n` tokens are an estimate of `in_features²` numbers. For small `n` the
    estimate is bad and error feedback fits noise. With an inverse-Wishart prior of `d` pseudo-tokens around
    the layer's second moments (those of all experts' tokens together), the posterior mean is

        H = (n H_expert + d H_layer) / (n + d),    d = in_features

    (Haff 1980, "Empirical Bayes estimation of the multivariate normal covariance matrix"; Ledoit and Wolf
    2004 shrink likewise, towards the identity). An expert without tokens has the layer's statistics.
    """
    share = borrowed(own.tokens, in_features, choice)
    if not share:
        return own

    def mixed(name: str) -> Tensor | None:
        mine, theirs = getattr(own, name), getattr(layer, name)
        if mine is None or (name == "peak" and own.tokens):
            return mine
        return mine.mul_(1 - share).add_(theirs, alpha=share) if share < 1 else theirs.clone()

    found = [field.name for field in fields(own) if isinstance(getattr(own, field.name), Tensor)]
    names = [name for name in found if name != "inputs"]  # which are no means
    return replace(own, **{name: mixed(name) for name in names})
