"""A block as a transform sees it, and the changes that a transform made to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import SiteStatistics, Solved


@dataclass(frozen=True)
class BlockView:
    """A block with its original weights, in float32 or 16 bit, as a transform sees it.

    sites: all sites with linears. statistics: of every site with a linear to be quantized, on the original
    inputs, and of a layer's experts together, a site without linears; used up. grids: by linear; None for a
    linear that stays in 16 bit. probe: runs the block, in float32, on a few tokens. stored: returns the
    values of a parameter, by its name in the block, after storing. away: linears of experts that are not in
    memory; their sites have only the number of tokens. read: loads one of them until the next is read.
    """

    block: nn.Module
    sites: Sequence[Site]
    statistics: Mapping[Site, SiteStatistics]
    grids: Mapping[str, Grid | None]
    probe: Callable[[], Tensor]
    stored: Callable[[str, Tensor], Tensor]
    away: frozenset[str] = frozenset()
    read: Callable[[str], nn.Module] | None = None

    def linear(self, name: str) -> nn.Module:
        """Return a linear with its values."""
        return self.read(name) if name in self.away else self.block.get_submodule(name)

    def is_away(self, site: Site) -> bool:
        """Return True for a site of an expert that is not in memory."""
        return not self.away.isdisjoint(site.linears)


@dataclass(frozen=True)
class Transformed:
    """The changes of a transform to a block, whose weights it changed in place.

    statistics: of every site with linears, for its new inputs. changed: parameters with new values, by name
    in the block, without quantized linears. known: by linear, fields of Solved: rtn_error, of the original
    weight; notes; scaled, the record of its column scale. divided_by: by site, the scale of its inputs,
    `[in]`. row_factors: by linear, the factors of its rows, `[out]`. exact: by linear, the weight to be
    quantized, `[out, in]` float32, if the block computes with a rounded one. pending: linears that were away
    and are to change. expert: transforms one expert later, when its linears are in memory and none is away;
    the view has the statistics of its sites.
    """

    statistics: dict[Site, SiteStatistics]
    changed: set[str] = field(default_factory=set)
    known: dict[str, dict] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    expert: Callable[[BlockView, Sequence[str]], Transformed] | None = None
    row_factors: dict[str, Tensor] = field(default_factory=dict)
    divided_by: dict[Site, Tensor] = field(default_factory=dict)

    def report(self, name: str, **facts: object) -> None:
        """Add facts about a linear to `known`."""
        self.known[name] = self.known.get(name, {}) | facts

    def amend(self, name: str, solved: Solved) -> Solved:
        """Add the facts of `known` to a linear's result."""
        known = self.known.get(name, {})
        return replace(solved, **known | {"notes": (*known.get("notes", ()), *solved.notes)})

    def curvature(self, name: str, found: Tensor | None) -> Tensor | None:
        """Return G of a linear's new outputs for G of the original ones; `found` is used up.

        Outputs multiplied by f have gradients divided by f. Scaled columns change no output.
        """
        factor = self.row_factors.get(name)
        return found if found is None or factor is None else found.div_(factor).div_(factor[:, None])
