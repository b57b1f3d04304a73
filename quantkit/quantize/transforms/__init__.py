"""Transforms: rewrites of a block that keep its function and make its weights easier to quantize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.solvers import SiteStatistics, Solved


@dataclass(frozen=True)
class BlockView:
    """What a transform may look at. The block's weights are the original ones, in float32 or 16 bit.

    sites: all of the block's that have linears. statistics: of every site with a linear to be quantized, on
    the original inputs, and of what enters a layer's experts together, a site without linears; they are used
    up. grids: by linear; None for one that is kept in 16 bit. probe: runs the block, held in float32, on a
    few tokens. stored: a parameter's values, by its name in the block, as they will be after storing. away:
    linears of experts that are not in memory; of their sites only the number of tokens is known. read: gives
    one of them its values until the next is read.
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
        """A linear with its values."""
        return self.read(name) if name in self.away else self.block.get_submodule(name)

    def is_away(self, site: Site) -> bool:
        """Whether the site is one of experts that are not in memory."""
        return not self.away.isdisjoint(site.linears)


@dataclass(frozen=True)
class Transformed:
    """What a transform did to a block, whose weights it changed in place.

    statistics: of every site with linears, as its inputs are now. changed: parameters with new values, by
    name in the block, quantized linears left out. rtn_errors: by linear, the relative error of rounding the
    original weight to nearest. notes: by linear, what a user should know. scaled: by linear, what is recorded
    of the scale of its columns. divided_by: by site, the scale of its inputs, `[in]`. row_factors: by
    linear, what its rows were multiplied by, `[out]`. exact: by linear, the weight to be quantized, `[out,
    in]` float32, where the block holds it rounded to what it computes in. pending: linears that were away and
    are to change. expert: does to one expert what is left to do, when its linears are in memory and none is
    away; the view has the statistics of its sites.
    """

    statistics: dict[Site, SiteStatistics]
    changed: set[str] = field(default_factory=set)
    rtn_errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scaled: dict[str, dict] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    expert: Callable[[BlockView, Sequence[str]], Transformed] | None = None
    row_factors: dict[str, Tensor] = field(default_factory=dict)
    divided_by: dict[Site, Tensor] = field(default_factory=dict)

    def amend(self, name: str, solved: Solved) -> Solved:
        """A linear's result with what is known of it before the transform."""
        notes = (*self.notes.get(name, ()), *solved.notes)
        rtn_error = self.rtn_errors.get(name, solved.rtn_error)
        return replace(solved, rtn_error=rtn_error, notes=notes, scaled=self.scaled.get(name))

    def curvature(self, name: str, found: Tensor | None) -> Tensor | None:
        """That at the outputs of a linear as they are now, for G of the original ones; `found` is used up.

        Outputs that were multiplied by f have gradients that are divided by f. Columns, scaled along with the
        inputs, change nothing there.
        """
        factor = self.row_factors.get(name)
        return found if found is None or factor is None else found.div_(factor).div_(factor[:, None])


class Transform(Protocol):
    """Applied to every block before any of its sites is solved, and to experts that are away then, one by
    one, before theirs are. `needs`: fields of SiteStatistics. `sample`: share of the calibration tokens that
    is enough to choose by. Below 1 experts stay as they are: no statistics of theirs are gathered, and all
    sites are then measured in order, by all tokens."""

    needs: frozenset[str]
    sample: float

    def apply(self, view: BlockView) -> Transformed:
        """Rewrite the block in place."""
