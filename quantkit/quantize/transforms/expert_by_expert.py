"""Transform a block before it is solved, with streamed experts one after another.

One forward pass with the original weights measures the sites outside experts and the inputs of whole layers
of experts; these inputs and their routing are kept. An expert's own statistics are computed from its tokens
and its original weights. For one expert at a time: statistics, transform, solving. The results equal those of
a block that is completely in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torch import Tensor

from quantkit.models.machine.expert_share import expert_of
from quantkit.models.skeleton.experts import Experts, Routed
from quantkit.quantize.calibrate import measure
from quantkit.quantize.calibrate.capture import Statistics
from quantkit.quantize.calibrate.measure import Block, Measured, Measuring
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.transforms.scaling import ColumnScaling


class ExpertByExpert:
    """A block and its transform. parts: receives changed parameters of experts that stay in 16 bit."""

    def __init__(self, by: Measuring, block: Block, transform: ColumnScaling, parts: BlockParts):
        self._by, self._block, self._parts = by, block, parts
        self._away = by.skeleton.away(block.index)
        self._lent: str | None = None
        self._seen: dict[str, list[Routed]] = {}  # by layer, one for each batch
        around = [site for site in block.chosen if self._away.isdisjoint(site.linears)]
        with self._listening():
            gathered = by.at_once(block, around)
        pools = gathered if self._away else {}
        self._pools = {site.pool: found for site, found in pools.items() if not site.linears}
        experts_alone = [site for site in block.chosen if not self._away.isdisjoint(site.linears)]
        counted = {}
        for site in experts_alone:
            layer, number = self._place(site)
            tokens = sum(seen.count(number) for seen in self._seen[layer]) if site.pool else 0
            counted[site] = SiteStatistics(tokens=tokens)
        with by.timings("transform"):
            self._done = transform.apply(by.view(block, {**gathered, **counted}))
        self._statistics = self._done.statistics

    def measured(self) -> Measured:
        """Return the block's statistics: each site in `order`, after earlier sites are quantized."""
        return Measured(self._of, self._outputs, self._give_back, self._done, self._order())

    def _order(self) -> list[Site]:
        """Return the sites, grouped by expert."""
        found: dict[str, list[Site]] = {}
        for site in self._block.chosen:
            if site.linears:
                found.setdefault(self._expert(site) or site.place, []).append(site)
        return [site for sites in found.values() for site in sites]

    def _expert(self, site: Site) -> str | None:
        return expert_of(site.linears[0]) if site.linears[0] in self._away else None

    def _listening(self) -> ExitStack:
        """Keep the inputs of layers of experts until the returned stack is closed."""
        stack = ExitStack()
        where = self._by.states.home
        for name, layer in self._block.module.named_modules():
            if self._away and isinstance(layer, Experts):
                seen = self._seen[name] = []

                def keep(module: Experts, args: tuple, kwargs: dict, seen: list[Routed] = seen) -> None:
                    routed = module.routed(*args, **kwargs)
                    seen.append(replace(routed, hidden=routed.hidden.to(where, copy=True)))

                stack.callback(layer.register_forward_pre_hook(keep, with_kwargs=True).remove)
        return stack

    def _place(self, site: Site) -> tuple[str, int]:
        """Return the layer's name and the number of a site's expert."""
        layer, _, number = expert_of(site.linears[0]).rpartition(".")
        return layer, int(number)

    def _of(self, site: Site) -> SiteStatistics:
        expert = self._expert(site)
        if expert and expert != self._lent:
            self._lend(expert)
        return self._statistics.pop(site)

    def _lend(self, expert: str) -> None:
        """Load an expert into memory and finish its transform."""
        by, index = self._by, self._block.index
        linears = [name for name in self._block.rows if name in self._away and expert_of(name) == expert]
        by.skeleton.lend(index, linears)
        self._lent = expert
        sites = [site for site in self._block.chosen if site.linears and self._expert(site) == expert]
        statistics = {site: self._gathered(site) for site in sites}
        view = replace(by.view(self._block, statistics), away=frozenset())
        with by.timings("transform"):
            done = self._done.expert(view, linears)
        for name in sorted(done.changed):
            stored, tensor = by.skeleton.as_stored(index, name)
            self._parts.add({stored: tensor.contiguous()})
            by.skeleton.keep_changed(index, name, partial(self._parts.tensor, stored))
        for name, facts in done.known.items():
            self._done.report(name, **facts)
        self._done.row_factors.update(done.row_factors)
        self._statistics.update(done.statistics)

    def _gathered(self, site: Site) -> SiteStatistics:
        """Return the statistics of a site of the expert in memory, with its original weights."""
        by = self._by
        sums = Statistics(site.in_features, by.skeleton.device, by.needs)
        with by.timings("forward"):
            for inputs in self._inputs(site) if site.pool else ():
                sums.add(inputs)
        own = by.finished(self._block, site, sums)
        if not site.pool:
            return own
        return measure.of_expert(own, self._pools[site.pool], site.in_features, by.choice)

    def _inputs(self, site: Site) -> Iterator[Tensor]:
        """Yield the inputs of an expert's site, batch by batch."""
        name, number = self._place(site)
        layer = self._block.module.get_submodule(name)
        for seen in self._seen[name]:
            hidden = seen.hidden.to(self._by.skeleton.device)[seen.rows[number]]
            yield hidden if site.pool == f"{name}.entering" else layer.inner(number, hidden)

    def _give_back(self) -> None:
        """Release the expert in memory."""
        if self._lent:
            self._by.skeleton.lend(self._block.index, ())
        self._lent = None

    def _outputs(self) -> Iterator[Tensor]:
        """Scale experts that are not quantized; then return the block's outputs."""
        left = {expert_of(name) for name in self._done.pending}
        quantized = {self._expert(site) for site in self._block.chosen if site.linears}
        for expert in sorted(left - quantized):
            self._lend(expert)
        self._give_back()
        self._seen.clear()
        return self._by.outputs(self._block)
