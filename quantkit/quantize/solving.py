"""Solve a block's linears once their inputs are measured: solve ▶ encode ▶ install ▶ measure the error.

Ranks share the linears and experts: each rank solves some, then all get all results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from quantkit.grids.distance import error_up_to_scales, weight_error
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.curvature import Curvatures
from quantkit.quantize.calibrate.measure import Block
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.methods import Method
from quantkit.quantize.solvers import SiteStatistics, Solved, Solver
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.timings import Timings


@dataclass(frozen=True)
class Solving:
    """Solves the linears of one block. parts: receives the encoded tensors. transformed: earlier changes to
    the block. curvatures: of the linears' outputs, if measured."""

    skeleton: Skeleton
    method: Method
    timings: Timings
    block: Block
    parts: BlockParts
    transformed: Transformed
    curvatures: Curvatures | None = None

    def linears(
        self, found: Mapping[Site, SiteStatistics | None]
    ) -> Iterator[tuple[Site, LinearSpec, Solved]]:
        """Solve the linears of a site, or of several independent sites, and yield each result. found:
        statistics of each site. An expert that leaves memory is read from `parts` when needed again."""
        layout, index = self.method.layout, self.block.index
        known = {site: self._with_curvatures(site, statistics) for site, statistics in found.items()}
        weights: dict[str, Tensor] = {}
        with self.timings("solve"):
            if len(known) == 1:
                by = partial(solve, self.method.solver)
                solved = [self._solved(site, one, weights, by) for site, one in known.items()]
            else:  # a rank solves some of the sites
                own, by = distributed.dealt(list(known)), self.method.solver.solve
                mine = {site.place: self._solved(site, known[site], weights, by) for site in own}
                found = {place: one for part in distributed.all_gather(mine) for place, one in part.items()}
                solved = [found[site.place] for site in known]
        for site, results in zip(known, solved, strict=True):
            for row, result in zip(self._rows(site), results, strict=True):
                weight = weights.pop(row.local, None)
                if weight is None:  # another rank solved it
                    weight = self._weight(row)
                with self.timings("pack"):
                    packed, stored = layout.encode(result.weight), f"{row.name}.weight"
                    again = partial(self.parts.parts, row.name)
                    values = self.skeleton.install(index, row.local, layout, packed, stored, again)
                    self.parts.add_linear(row.name, packed)
                measured = self._measured(result, weight, values)
                yield site, row, self.transformed.amend(row.local, measured)

    def _with_curvatures(self, site: Site, statistics: SiteStatistics | None) -> SiteStatistics | None:
        """Return a site's statistics with the curvatures of its linears' outputs, which a head has not."""
        if self.curvatures is None or statistics is None or self.block.index == self.skeleton.depth:
            return statistics
        curvatures = (
            self.transformed.curvature(row.local, self.curvatures.of(self.block.index, row.local))
            for row in self._rows(site)
        )
        return replace(statistics, curvatures=tuple(curvatures))

    def _weight(self, row: LinearSpec) -> Tensor:
        """Return the weight to be quantized, float32 `[out, in]`."""
        exact = self.transformed.exact
        return exact.pop(row.local, self.skeleton.part(self.block.index, row.local).weight).float()

    def _rows(self, site: Site) -> list[LinearSpec]:
        """Return the LinearSpecs of a site's linears that are quantized."""
        return [self.block.rows[name] for name in site.linears if self.block.rows[name].grid]

    def _solved(
        self,
        site: Site,
        statistics: SiteStatistics | None,
        weights: dict[str, Tensor],
        by: Callable[..., list[Solved]],
    ) -> list[Solved]:
        """Return a site's linears, solved by `by`. weights: receives the original weights."""
        rows = self._rows(site)
        own = [self._weight(row) for row in rows]
        weights |= {row.local: weight for row, weight in zip(rows, own, strict=True)}
        grids = [row.grid.together(own) for row in rows]
        solved = by(own, grids, statistics)
        if statistics and "peak" in self.method.layout.needs:
            solved = [result.with_input_peak(statistics.peak) for result in solved]
        return solved

    def _measured(self, solved: Solved, weight: Tensor, values: Tensor) -> Solved:
        """Add the error of the stored values, by which a checkpoint can be verified against its source."""
        if solved.error is None or self.method.transform is None:
            plain = weight_error(weight, values)
            error = plain if solved.error is None else solved.error
            solved = replace(solved, error=error, weight_error=plain)
        if self.method.transform is not None:
            solved = replace(solved, weight_error=None, scaled_error=error_up_to_scales(weight, values))
        return solved


def groups(sites: Sequence[Site], independent: bool) -> Iterator[list[Site]]:
    """Yield sites one by one; independent experts' sites in groups of as many as there are ranks."""
    group: list[Site] = []
    for site in sites:
        both = [*group[:1], site]
        same = site.pool and site.pool == both[0].pool and len(group) < distributed.count()
        free = independent and all(one.linears and one.calls and not one.whole for one in both)
        if group and not (same and free):
            yield group
            group = []
        group.append(site)
    if group:
        yield group


def solve(
    solver: Solver, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
) -> list[Solved]:
    """Return the results of `solver.solve`. Ranks share the linears, largest first."""
    if distributed.count() == 1:
        return solver.solve(weights, grids, statistics)
    largest = sorted(range(len(weights)), key=lambda k: -weights[k].numel())
    own = distributed.dealt(largest)
    solved = solver.solve([weights[k] for k in own], [grids[k] for k in own], statistics) if own else []
    parts = distributed.all_gather(dict(zip(own, solved, strict=True)))
    found = {k: result for part in parts for k, result in part.items()}
    return [found[k] for k in range(len(weights))]
