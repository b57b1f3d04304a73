"""Transform a block before it is solved, with streamed experts one after another.

One forward pass with the original weights measures the sites outside experts and the inputs of whole layers
of experts; these inputs and their routing are kept. An expert's own statistics are computed from its tokens
and its original weights. For one expert at a time: statistics, transform, solving. The results equal those of
a block that is completely in memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torch import Tensor

from quantkit.models.machine.expert_share import expert_of
from quantkit.models.skeleton.experts import Experts, Routed
from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.schedule import Advance, Visit
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.transforms.scaling import ColumnScaling


class ExpertByExpert:
    """A block and its transform. transformed: the changes so far. parts: receives changed parameters of
    experts that stay in 16 bit."""

    def __init__(self, measuring: Measuring, transform: ColumnScaling, parts: BlockParts):
        self._measuring, self._block, self._parts = measuring, measuring.block, parts
        self._away = measuring.skeleton.away(self._block.index)
        self._routed: dict[str, list[Routed]] = {}  # by layer, one for each batch
        alone = [site for site in self._block.chosen if not self._away.isdisjoint(site.linears)]
        with self._listening():
            statistics = measuring.at_once([site for site in self._block.chosen if site not in alone])
        pools = statistics if self._away else {}
        self._pools = {site.pool: shared for site, shared in pools.items() if not site.linears}
        counted = {site: SiteStatistics(tokens=self._tokens(site)) for site in alone}
        with measuring.timings("transform"):
            self.transformed = transform.apply(measuring.view(statistics | counted))

    def visits(self, advance: Advance) -> Iterator[Visit]:
        """Visit the sites, grouped by expert (see `calibrate/schedule.py`)."""
        by_expert: dict[str, list[Site]] = {}
        for site in self._block.chosen:
            if site.linears:
                by_expert.setdefault(self._expert(site) or site.module, []).append(site)
        pending = {expert_of(name) for name in self.transformed.pending} - by_expert.keys()
        try:
            for expert, sites in by_expert.items():
                statistics = self._lend(expert) if self._expert(sites[0]) else self.transformed.statistics
                for site in sites:
                    yield {site: statistics.pop(site)}
            for expert in sorted(pending):  # scaled, but not quantized
                self._lend(expert)
        finally:
            if self._away:
                self._measuring.skeleton.keepers[self._block.index].lend(())
        self._routed.clear()
        advance(self._measuring.outputs())

    def _expert(self, site: Site) -> str | None:
        """Return the expert of a site that is not in memory; None for others."""
        return expert_of(site.linears[0]) if site.linears[0] in self._away else None

    def _listening(self) -> ExitStack:
        """Keep the inputs of layers of experts until the returned stack is closed."""
        stack = ExitStack()
        home = self._measuring.states.home
        for name, layer in self._block.module.named_modules():
            if self._away and isinstance(layer, Experts):
                batches = self._routed[name] = []

                def keep(module: Experts, args: tuple, kwargs: dict, batches: list[Routed] = batches) -> None:
                    routed = module.routed(*args, **kwargs)
                    batches.append(routed._replace(hidden=routed.hidden.to(home, copy=True)))

                stack.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        return stack

    def _layer(self, site: Site) -> tuple[str, int]:
        """Return the layer's name and the number of a site's expert."""
        layer, _, number = expert_of(site.linears[0]).rpartition(".")
        return layer, int(number)

    def _tokens(self, site: Site) -> int:
        layer, number = self._layer(site)
        return sum(len(routed.rows[number]) for routed in self._routed[layer]) if site.pool else 0

    def _lend(self, expert: str) -> dict[Site, SiteStatistics]:
        """Load an expert into memory and finish its transform. Returns the statistics of its sites."""
        measuring, block = self._measuring, self._block
        skeleton, index = measuring.skeleton, block.index
        linears = [name for name in block.specs if name in self._away and expert_of(name) == expert]
        keeper = skeleton.keepers[index]
        keeper.lend(linears)
        sites = [site for site in block.chosen if site.linears and self._expert(site) == expert]
        view = replace(measuring.view({site: self._gathered(site) for site in sites}), away=frozenset())
        with measuring.timings("transform"):
            inner = self.transformed.expert(view, linears)
        for name in sorted(inner.changed):
            stored, tensor = skeleton.as_stored(index, name)
            self._parts.add({stored: tensor.contiguous()})
            keeper.keep_changed(name, partial(self._parts.tensor, stored))
        for name, facts in inner.facts.items():
            self.transformed.report(name, **facts)
        self.transformed.row_factors.update(inner.row_factors)
        return inner.statistics

    def _gathered(self, site: Site) -> SiteStatistics:
        """Return the statistics of a site of the expert in memory, with its original weights."""
        measuring = self._measuring
        sums = measuring.sums(site)
        with measuring.timings("forward"):
            for inputs in self._inputs(site) if site.pool else ():
                sums.add(inputs)
        statistics = measuring.finished(site, sums)
        return statistics.mixed(self._pools[site.pool], measuring.choice) if site.pool else statistics

    def _inputs(self, site: Site) -> Iterator[Tensor]:
        name, number = self._layer(site)
        layer = self._block.module.get_submodule(name)
        for routed in self._routed[name]:
            hidden = routed.hidden.to(self._measuring.skeleton.device)[routed.rows[number]]
            yield hidden if site.pool == f"{name}.entering" else layer.inner(number, hidden)
