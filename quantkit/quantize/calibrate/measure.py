"""Measuring: the statistics of a block's sites, each asked for once the sites before it are quantized."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Literal

from torch import Tensor, nn

from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.machine.memory import return_freed_pages
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import capture
from quantkit.quantize.calibrate.capture import Statistics
from quantkit.quantize.calibrate.forwards import SuspendedForward, gather_together, repeated
from quantkit.quantize.calibrate.original import Original
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Site
from quantkit.quantize.calibrate.states import States
from quantkit.quantize.prepare.plan import Execution
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.timings import Timings
from quantkit.quantize.transforms import BlockView, Transformed

Choice = Literal["shrink", "routed", "all"]  # whose tokens an expert's statistics are made of


@dataclass(frozen=True)
class Block:
    """A block that is loaded. rows: its linears by their names inside it; sites: in the order a forward
    reaches them; probe: a few tokens that enter it, the same on all ranks, so that what is found out by them
    is, too."""

    index: int
    module: nn.Module
    rows: dict[str, LinearSpec]
    sites: list[Site]
    probe: Tensor | None = None

    @cached_property
    def wanted(self) -> list[Site]:
        """Sites with something to quantize, and those of all experts where some of them are among these."""
        wanted = {site for site in self.sites if any(self.rows[name].grid for name in site.linears)}
        pools = {site.pool for site in wanted}
        return [site for site in self.sites if site in wanted or (not site.linears and site.pool in pools)]

    def row(self, site: Site) -> LinearSpec:
        """A linear that reads the site's inputs."""
        readers = (name for one in self.sites if one == site or one.pool == site.pool for name in one.linears)
        return self.rows[site.linears[0] if site.linears else next(readers)]


@dataclass(frozen=True)
class Measured:
    """What is known of a block's inputs. statistics: of a site, asked for in order, once those before it are
    quantized; outputs: the block's, once all are. transformed: what was and is being done to the block.
    order: of the sites; None for that of a forward. independent: sites that read what enters a layer of
    experts may be asked for before those of the layer that come before are quantized."""

    statistics: Callable[[Site], SiteStatistics | None]
    outputs: Callable[[], Iterable[Tensor]]
    close: Callable[[], None] = lambda: None
    transformed: Transformed = Transformed({})
    order: Sequence[Site] | None = None
    independent: bool = False


@dataclass(frozen=True)
class Measuring:
    """How a block is measured, by running `states` through it. needs: fields of SiteStatistics; choice: whose
    tokens an expert's statistics are made of (`of_expert`); original: the block in the original model, if
    asked for; batches: those of all ranks, of which `states` are this one's."""

    skeleton: Skeleton
    states: States
    execution: Execution
    needs: frozenset[str]
    choice: Choice
    timings: Timings
    batches: int
    original: Original | None = None

    def run(self, block: Block, most: int | None = None) -> Callable[[int], Tensor]:
        """How a batch goes through the block, by its number; `most` of its sequences."""
        if self.original:
            return partial(self.original.run, most=most)
        return lambda k: self.skeleton.run_block(block.index, self.states[k][:most])

    def outputs(self, block: Block) -> Iterator[Tensor]:
        """The block's outputs, batch by batch, as it computes now."""
        return self.skeleton.in_step(block.index, self.run(block), len(self.states))

    def view(self, block: Block, statistics: Mapping[Site, SiteStatistics]) -> BlockView:
        """The block as a transform sees it."""
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
        """Statistics of each site behind those that were quantized before it."""
        reached = [site for site in block.wanted if site.calls]
        repeats = self.execution.sequential == "repeat" or any(site.whole for site in reached)
        pools = _Pools(self.choice)
        if repeats:
            again = _Repeated(self, block)
            statistics = lambda site: pools.mixed(site, again.of(site))  # noqa: E731
            return Measured(statistics, again.outputs, independent=True)
        wanted = set(block.wanted)
        # experts that are kept as they are let all batches wait, too: one reading of their weights serves all
        seen = [site for site in block.sites if site.calls]
        seen = [site for site in seen if site in wanted or (site.pool and site.linears)]
        forward = SuspendedForward(block.module, seen, self.run(block), len(self.states))

        def statistics(site: Site) -> SiteStatistics:
            own = self.summed(block, site, forward.inputs(site) if site.calls else ())
            return pools.mixed(site, own)

        return Measured(statistics, forward.outputs, forward.close)

    def at_once(self, block: Block, sites: Sequence[Site], sample: float = 1.0) -> dict[Site, SiteStatistics]:
        """Statistics of all these sites on the block's inputs as they are now, from one forward of an even
        sample of the sequences."""
        own = distributed.span(self.batches)
        every, sequences = range(0, self.batches, round(1 / sample)), len(self.states[0])
        wanted = sample * sequences * self.batches
        most = math.ceil(wanted / len(every))  # sequences of a batch: fewer than all where batches are few
        every = [k - own.start for k in every if k in own]
        run, whole = self.run(block, most), sample == 1
        outputs = self.skeleton.in_step(block.index, lambda k: run(every[k]), len(every))
        with self.timings("forward"):
            gathered = capture.gather(
                block.module, sites, self.needs, self.skeleton.device,
                lambda: list(map(len, outputs)),
                self.original.meant if whole and self.original else lambda site: None,
            )  # fmt: skip
        pools = _Pools(self.choice)
        return {site: pools.mixed(site, self.finished(block, site, sums)) for site, sums in gathered.items()}

    def summed(self, block: Block, site: Site, inputs: Iterable[Tensor]) -> SiteStatistics:
        """Statistics of a site over all batches of its inputs."""
        sums = Statistics(site.in_features, self.skeleton.device, self.needs)
        for k, batch in enumerate(self.timings.waiting("forward", inputs)):
            with self.timings("hessian", wait=False):
                sums.add(batch, self.original.meant(site, k) if self.original else None)
        return self.finished(block, site, sums)

    def finished(self, block: Block, site: Site, sums: Statistics) -> SiteStatistics:
        """The site's statistics; refuses activations that are not finite, by name."""
        with self.timings("hessian"):
            statistics = sums.finish()
            return_freed_pages()  # the solver's copies are a block's peak: let them not come on top of holes
        capture.refuse_not_finite(statistics, block.row(site).name, self.execution.dtype)
        return statistics


class _Pools:
    """Statistics of experts, with those of all tokens of their layer mixed in, which come right before."""

    def __init__(self, choice: Choice):
        self._choice = choice
        self._layer: tuple[str | None, SiteStatistics | None] = None, None

    def mixed(self, site: Site, own: SiteStatistics) -> SiteStatistics:
        """A site's statistics as it is solved with."""
        if not site.linears:
            self._layer = site.pool, own
        elif site.pool:
            pool, layer = self._layer
            assert pool == site.pool, f"{site.linears[0]} is measured behind {pool}"
            return of_expert(own, layer, site.in_features, self._choice)
        return own


class _Repeated:
    """The block runs again for every site, but once for as many sites of a layer's experts as fit."""

    def __init__(self, by: Measuring, block: Block):
        self._by, self._block = by, block
        self._each = lambda run, count: by.skeleton.in_step(block.index, run, count)
        self._run = by.run(block)
        self._gathered: dict[Site, Statistics] = {}
        self.outputs = partial(self._each, self._run, len(by.states))

    def of(self, site: Site) -> SiteStatistics:
        """A site's own statistics."""
        by, block = self._by, self._block
        if not (site.pool and site.calls and not site.whole):
            inputs = repeated(block.module, site, self._run, len(by.states), self._each)
            return by.summed(block, site, inputs if site.calls else ())
        if site not in self._gathered:
            with by.timings("forward"):
                self._gathered = gather_together(
                    block.module, self._together(site), by.needs, by.skeleton.device, self._run,
                    len(by.states), self._each,
                )  # fmt: skip
        return by.finished(block, site, self._gathered.pop(site))

    def _together(self, site: Site) -> Sequence[Site]:
        """The site, and others of its layer's experts from there on."""
        found: list[Site] = []
        for other in self._block.wanted[self._block.wanted.index(site) :]:
            if other.pool != site.pool or other.whole or len(found) == self._by.execution.at_once:
                break
            found.append(other)
        return found


def borrowed(tokens: int, in_features: int, choice: Choice) -> float:
    """The layer's share in an expert's statistics."""
    if choice == "all" or not tokens:
        return 1.0
    return in_features / (tokens + in_features) if choice == "shrink" else 0.0


def of_expert(own: SiteStatistics, layer: SiteStatistics, in_features: int, choice: Choice) -> SiteStatistics:
    """An expert's statistics, with the layer's mixed in; the peak is its own where it has tokens.

    The second moments of an expert's `n` tokens are an estimate of `in_features²` numbers, and for small `n`
    a bad one: error feedback then fits noise. With an inverse-Wishart prior of `d` pseudo-tokens around the
    second moments of the layer, of all experts' tokens together, the posterior mean is

        H = (n H_expert + d H_layer) / (n + d),    d = in_features

    (Haff 1980, "Empirical Bayes estimation of the multivariate normal covariance matrix"; Ledoit and Wolf
    2004 shrink likewise, towards the identity). An expert that nobody reached has the layer's own.
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
