"""The order in which the sites of a block are solved: generators of visits.

*Resuming a generator means that the sites of its last visit are installed.* Later sites are measured on the
outputs of installed ones. After the last visit a generator passes the block's outputs to `advance`.

`transforms/expert_by_expert.py` has another generator, for a transform that sees all tokens of a block, such
as AWQ's: it measures before anything is installed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby, takewhile

from torch import Tensor

from quantkit.models.machine import distributed
from quantkit.quantize.calibrate import forwards
from quantkit.quantize.calibrate.capture import SiteSums
from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.statistics import SiteStatistics

Advance = Callable[[Iterable[Tensor]], None]
# A site to be solved now, or several independent ones, with the statistics of each. A generator gives its
# visits away: they are the only owners of the statistics.
Visit = dict[Site, SiteStatistics]


def visits(measuring: Measuring, advance: Advance) -> Iterator[Visit]:
    """Return the generator for a block as the job runs."""
    if not measuring.needs:
        return unmeasured(measuring, advance)
    whole = any(site.whole for site in measuring.block.chosen if site.calls)
    repeats = whole or measuring.execution.sequential == "repeat"
    return (repeated if repeats else suspended)(measuring, advance)


def unmeasured(measuring: Measuring, advance: Advance) -> Iterator[Visit]:
    """Visit sites without statistics."""
    for site in measuring.block.chosen:
        yield {site: SiteStatistics()}
    advance(measuring.outputs())


def suspended(measuring: Measuring, advance: Advance) -> Iterator[Visit]:
    """Run each batch once, suspended at each site until the site is installed."""
    block, layers = measuring.block, {}
    # all batches also wait for experts that stay in 16 bit, so that their weights are read once
    waiting = {*block.chosen, *(site for site in block.sites if site.pool and site.linears)}
    sites = [site for site in block.sites if site.calls and site in waiting]
    run, count = measuring.run(), len(measuring.states)
    with closing(forwards.SuspendedForward(block.module, sites, run, count)) as forward:

        def measured(site: Site) -> SiteStatistics:
            statistics = measuring.summed(site, forward.inputs(site) if site.calls else ())
            return measuring.mixed(layers, site, statistics)

        for site in block.chosen:
            if site.linears:
                yield {site: measured(site)}
            else:
                measured(site)
        advance(forward.outputs())


def repeated(measuring: Measuring, advance: Advance) -> Iterator[Visit]:
    """Run all batches again up to each site, but only once for several experts' sites that fit in memory."""
    block, run, layers = measuring.block, measuring.run(), {}
    gathered: dict[Site, SiteSums] = {}
    at_once, count = measuring.execution.at_once, len(measuring.states)

    def unmixed(site: Site) -> SiteStatistics:
        if not _independent(site):
            module = block.module.get_submodule(site.module)
            inputs = forwards.repeated(module, run, count, measuring.in_step, site.whole)
            return measuring.summed(site, inputs if site.calls else ())
        if site not in gathered:
            following = block.chosen[block.chosen.index(site) :][:at_once]
            together = list(takewhile(lambda each: each.pool == site.pool and not each.whole, following))
            with measuring.timings("forward"):
                sums = {each: measuring.sums(each) for each in together}
                forwards.gather_together(block.module, sums, run, count, measuring.in_step)
                gathered.update(sums)
        return measuring.finished(site, gathered.pop(site))

    def measured(sites: Sequence[Site]) -> Visit:
        return {site: measuring.mixed(layers, site, unmixed(site)) for site in sites}

    most = max(1 if measuring.execution.device == "cpu" else at_once, distributed.count())
    for sites in _groups(block.chosen, most):
        if sites[0].linears:
            yield measured(sites)
        else:
            measured(sites)
    advance(measuring.outputs())


def _independent(site: Site) -> bool:
    """Return whether a site's inputs do not depend on the other sites of its layer of experts."""
    return bool(site.pool and site.calls and not site.whole)


def _groups(sites: Sequence[Site], most: int) -> Iterator[list[Site]]:
    """Yield sites one by one; experts' sites of a layer in groups of at most `most`."""
    kinds = groupby(sites, lambda site: site.pool if site.linears and _independent(site) else site)
    for alike in (list(group) for _, group in kinds):
        yield from (alike[k : k + most] for k in range(0, len(alike), most))
