"""The view of a block that a transform works on, and the changes that the transform made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.models.skeleton.experts import Experts
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.statistics import SiteStatistics


@dataclass(frozen=True)
class BlockView:
    """A block with its original weights, in float32 or 16 bit, for a transform.

    sites: all sites with linears. statistics: for the original inputs, of every site to be quantized and of
    the layer-wide sites of experts; transforms change them in place. grids: by linear; None for a linear in
    16 bit. probe: runs the block, in float32, on a few tokens. stored: returns a parameter's values, by its
    name in the block, as storing rounds them. read: returns a linear with its values; one that was away has
    them until the next call. away: linears of experts that are not in memory; their sites only have a number
    of tokens. expert: name of an expert's module, if the view is of this expert alone; `probe` then runs it.
    """

    block: nn.Module
    sites: Sequence[Site]
    statistics: Mapping[Site, SiteStatistics]
    grids: Mapping[str, Grid | None]
    probe: Callable[[], Tensor]
    stored: Callable[[str, Tensor], Tensor]
    read: Callable[[str], nn.Module]
    away: frozenset[str] = frozenset()
    expert: str = ""

    def is_away(self, site: Site) -> bool:
        """Return whether a site belongs to an expert that is not in memory."""
        return not self.away.isdisjoint(site.linears)

    def experts(self, entering: Mapping[str, Tensor], folded: Collection[Site]) -> Iterator[BlockView]:
        """Yield a view of each expert with sites to be quantized and not in `folded`. entering: a few tokens
        for each layer, `[tokens, in]` float32, which run through all its experts."""
        for name, layer in self.block.named_modules():
            if not isinstance(layer, Experts):
                continue
            tokens = entering[f"{name}.entering"]
            tokens = tokens[tokens.any(-1)]
            for index in range(layer.count):
                expert = f"{name}.{index}"
                inside = (site for site in self.statistics if site.linears and site not in folded)
                sites = [site for site in inside if site.linears[0].startswith(f"{expert}.")]
                if sites:
                    statistics = {site: self.statistics[site] for site in sites}
                    probe = partial(layer.alone, index, tokens)
                    yield replace(self, sites=sites, statistics=statistics, probe=probe, expert=expert)

    def shared(self, site: Site) -> Site:
        """Return the site at which all experts of a layer read, for an expert's site; others unchanged."""
        return Site((), site.pool) if site.pool and not self.expert else site


@dataclass(frozen=True)
class Transformed:
    """The changes that a transform made to a block, whose weights it changed in place.

    statistics: of every site with linears, for its new inputs. changed: names of parameters with new values,
    except quantized linears. facts: by linear, for its report: rtn_error of the original weight; notes;
    scaled. divided_by: by site, the scale of its inputs, `[in]`. row_factors: by linear, factors of its rows,
    `[out]`. exact: by linear, the float32 weight `[out, in]` to be quantized, if the block computes with a
    rounded one. pending: linears not in memory that still have to change. expert: transforms one expert
    later, when its linears are in memory; its view has the statistics of the expert's sites.
    """

    statistics: dict[Site, SiteStatistics]
    changed: set[str] = field(default_factory=set)
    facts: dict[str, dict] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    expert: Callable[[BlockView, Sequence[str]], Transformed] | None = None
    row_factors: dict[str, Tensor] = field(default_factory=dict)
    divided_by: dict[Site, Tensor] = field(default_factory=dict)

    def report(self, name: str, **facts: object) -> None:
        """Add facts about a linear."""
        self.facts[name] = self.facts.get(name, {}) | facts

    def curvature(self, name: str, original: Tensor | None) -> Tensor | None:
        """Return G of a linear's new outputs, from G of the original outputs, which is changed in place.

        Outputs multiplied by f have gradients divided by f. Scaled columns do not change outputs.
        """
        if original is None or name not in self.row_factors:
            return original
        factor = self.row_factors[name]
        return original.div_(factor).div_(factor[:, None])
