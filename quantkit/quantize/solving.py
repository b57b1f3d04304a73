"""Solve a block's linears once their inputs are measured: solve ▶ encode ▶ install ▶ measure the error.

Ranks share the linears and experts: each rank solves some, then all get all results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from torch import Tensor

from quantkit.errors import UNSUPPORTED, DamagedError, QuantkitError, count
from quantkit.grids.distance import error_up_to_scales, weight_error
from quantkit.grids.grid import Grid
from quantkit.layouts import Layout, LinearSpec, WeightsOnly
from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.curvature import Curvatures
from quantkit.quantize.calibrate.measure import Block
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.methods import BuiltMethod
from quantkit.quantize.solvers import SiteStatistics, Solved, Solver
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.timings import Timings


@dataclass(frozen=True)
class Solving:
    """Solves the linears of one block. parts: receives the encoded tensors. transformed: earlier changes to
    the block. curvatures: of the linears' outputs, if measured."""

    skeleton: Skeleton
    method: BuiltMethod
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
        solver = self.method.solver
        with self.timings("solve"):
            if len(known) == 1:
                solved = [solve(solver, *self._problem(site, *known.values(), weights)) for site in known]
            else:  # a rank solves some of the sites, at once if the solver can
                own = distributed.dealt(list(known))
                problems = [self._problem(site, known[site], weights) for site in own]
                many = getattr(solver, "solve_many", lambda sites: [solver.solve(*site) for site in sites])
                mine = many(problems) if problems else []
                parts = distributed.all_gather(dict(zip((site.place for site in own), mine, strict=True)))
                found = {place: one for part in parts for place, one in part.items()}
                solved = [found[site.place] for site in known]
        for site, results in zip(known, solved, strict=True):
            for row, result in zip(self._rows(site), results, strict=True):
                if known[site] and "peak" in layout.needs:
                    result = result.with_input_peak(known[site].peak)
                weight = weights.pop(row.local, None)
                if weight is None:  # another rank solved it
                    weight = self._weight(row)
                with self.timings("pack"):
                    packed, stored = layout.encode(result.weight), f"{row.name}.weight"
                    again = partial(self.parts.parts, row.name)
                    try:
                        values = self.skeleton.install(index, row.local, layout, packed, stored, again)
                    except DamagedError as error:  # values were finite before they were encoded
                        what = f"{row.name} has weights up to {weight.abs().max():.3g}: too large for "
                        hint = f"keep it in 16 bit: --exclude '{re.escape(row.name)}$'"
                        raise QuantkitError(what + row.grid.describe(), hint, UNSUPPORTED) from error
                    self.parts.add_linear(row.name, packed)
                measured = self._measured(row, result, weight, values)
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

    def _problem(self, site: Site, statistics: SiteStatistics | None, weights: dict[str, Tensor]) -> tuple:
        """Return the arguments of `Solver.solve` for a site. weights: receives the original weights."""
        rows = self._rows(site)
        own = [self._weight(row) for row in rows]
        weights |= {row.local: weight for row, weight in zip(rows, own, strict=True)}
        return own, [row.grid.together(own) for row in rows], statistics

    def _measured(self, row: LinearSpec, solved: Solved, weight: Tensor, values: Tensor) -> Solved:
        """Add the error of the stored values, by which a checkpoint can be verified against its source.

        After a transform, the source's weight is read again, as verification will read it: the fit of scales
        stops before the least error, so the scaled weight has another error.
        """
        size = row.grid.group_size if row.in_features % row.grid.group_size == 0 else row.in_features
        some, kept = (part.reshape(-1, size).any(1) for part in (weight, values))
        if lost := int((some & ~kept).sum()):
            note = f"{count(lost, 'group')} of weights became 0, too small for {row.grid.describe()}"
            solved = replace(solved, notes=(*solved.notes, note))
        if solved.error is None or self.method.transform is None:
            plain = weight_error(weight, values)
            solved = replace(solved, error=plain if solved.error is None else solved.error)
            if self.method.transform is None:
                return replace(solved, weight_error=plain)
        name = self.skeleton.names.of_block(self.block.index, f"{row.local}.weight")
        source = self.skeleton.read(name, weight).to(values.device).float()
        return replace(solved, scaled_error=error_up_to_scales(source, values))


def round_block(
    skeleton: Skeleton,
    index: int,
    specs: Sequence[LinearSpec],
    solver: Solver,
    layout: Layout,
    weights_only: bool = False,
) -> None:
    """Quantize a loaded block in memory with a solver that needs no statistics. The block then computes as a
    client of `layout`, or with decoded weights if `weights_only`. Streamed experts stay in memory as codes.
    """
    computing = WeightsOnly(layout) if weights_only else layout
    for row in specs:
        if row.block == index and row.grid is not None:
            weight = skeleton.part(index, row.local).weight.float()
            (solved,) = solver.solve([weight], [row.grid], None)
            parts = layout.encode(solved.weight)
            skeleton.install(index, row.local, computing, parts, f"{row.name}.weight", partial(dict, parts))


def groups(sites: Sequence[Site], independent: bool, together: int = 1) -> Iterator[list[Site]]:
    """Yield sites one by one; independent experts' sites in groups, `together` of them or as many as there
    are ranks."""

    def kind(site: Site) -> str | Site:
        free = independent and site.linears and site.calls and not site.whole
        return site.pool if free and site.pool else site

    most = max(together, distributed.count())
    for alike in (list(found) for _, found in groupby(sites, kind)):
        yield from (alike[k : k + most] for k in range(0, len(alike), most))


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
