"""Quantize linears once their inputs are measured: solve ▶ encode ▶ install ▶ stage ▶ record.

`auto` and the matrices outside the blocks use `solve` as well. `eval --as` and the loss's baseline use
`round_block`. Ranks share the linears and experts: each rank solves some, then all get all results.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, DamagedError, QuantkitError, count
from quantkit.grids.distance import error_up_to_scales, weight_error
from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.layouts import Layout, LinearSpec, Statistic
from quantkit.models.machine import distributed
from quantkit.models.machine.device import is_accelerator, pinned
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate.curvature import Curvatures
from quantkit.quantize.calibrate.schedule import Visit
from quantkit.quantize.calibrate.sites import Block, Site
from quantkit.quantize.calibrate.statistics import SiteStatistics, retarget
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.solvers import Solved, Solver
from quantkit.quantize.staging.parts import BlockParts
from quantkit.quantize.timings import Timings

UNREACHED = "no calibration token entered it"


def solve(
    solver: Solver,
    weights: Sequence[Tensor],
    grids: Sequence[Grid],
    statistics: SiteStatistics,
    curvatures: Sequence[Tensor | None] = (),
) -> list[Solved]:
    """Return the linears of a site, quantized. Ranks share them, largest first. The statistics are shrunk
    (`SiteStatistics.shrink`), and a drift is taken out of them: its matrices, as large as the Hessian, must
    be freed before the weights are rounded.

    See `Solver.solve` for the other arguments.
    """
    share = list(range(len(weights)))  # the linears that this rank solves
    if distributed.count() > 1:
        share = distributed.dealt(sorted(share, key=lambda k: -weights[k].numel()))
    solved = []
    if share:
        targets = [weights[k] for k in share]
        if Statistic.HESSIAN in statistics:
            statistics.shrink()
        if Statistic.DRIFT in statistics:
            targets = retarget(targets, statistics.pop(Statistic.DRIFT), solver.damp)
        hessian, curved = statistics.get(Statistic.HESSIAN), [curvatures[k] for k in share if curvatures]
        solved = solver.solve(targets, [grids[k] for k in share], hessian, curved)
    by_number = _gathered(dict(zip(share, solved, strict=True)))
    return [by_number[k] for k in range(len(weights))]


def round_block(
    skeleton: Skeleton,
    index: int,
    specs: Sequence[LinearSpec],
    solver: Solver,
    layout: Layout,
    weights_only: bool = False,
) -> None:
    """Quantize a loaded block in memory with a data-free solver. Streamed experts stay in memory as codes.
    weights_only: linears compute with decoded weights, not as clients of the layout do."""
    for spec in specs:
        if spec.block == index and spec.grid is not None:
            weight = skeleton.part(index, spec.local).weight.float()
            (solved,) = solver.solve([weight], [spec.grid])
            skeleton.install(spec, layout, layout.encode(solved.weight), decoded=weights_only)


@dataclass(frozen=True)
class Quantizer:
    """Quantizes the linears of one block. parts: receives the packed tensors. transformed: earlier changes to
    the block; None without a transform. curvatures: of the linears' outputs; None if not measured."""

    skeleton: Skeleton
    solver: Solver
    layout: Layout
    timings: Timings
    block: Block
    parts: BlockParts
    transformed: Transformed | None
    curvatures: Curvatures | None = None

    def visit(self, sites: Visit) -> Iterator[tuple[LinearSpec, dict[str, Any]]]:
        """Quantize the linears of a visit's sites and yield the record of each; uses the statistics up.

        Ranks share the linears of one site, or else the sites, which are solved at once if the solver can.
        """
        with ThreadPoolExecutor(1, "sources") as reader:
            sources = self._sources(sites, reader)
            with self.timings("solve"):
                share = distributed.dealt(list(sites)) if len(sites) > 1 else list(sites)
                weights = {
                    spec.local: self._weight(spec) for site in share for spec in self.block.quantized(site)
                }
                problems = [self._problem(site, weights, sites[site]) for site in share]
                if len(sites) == 1:
                    solved = {share[0].module: solve(self.solver, *problems[0])}
                else:
                    given = [(w, grids, s.get(Statistic.HESSIAN), G) for w, grids, s, G in problems]
                    results = self.solver.solve_many(given) if given else []
                    solved = _gathered(dict(zip((site.module for site in share), results, strict=True)))
                    del given
                del problems  # the weights are freed one after another
            for site, statistics in sites.items():
                for spec, result in zip(self.block.quantized(site), solved[site.module], strict=True):
                    weight = weights.pop(spec.local, None)
                    if weight is None:  # another rank solved it
                        weight = self._weight(spec)
                    values = self._installed(spec, result.weight, weight, statistics)
                    source = sources[spec.local]() if sources else None
                    yield spec, self._record(spec, site, statistics, result, weight, values, source)

    def _sources(self, sites: Visit, reader: ThreadPoolExecutor) -> dict[str, Callable[[], Tensor]]:
        """Return functions that return the source's weights, by linear, if a transform changed them; else {}.
        For an accelerator, `reader` reads them while it solves."""
        sources: dict[str, Callable[[], Tensor]] = {}
        if self.transformed is None:
            return sources
        for spec in (spec for site in sites for spec in self.block.quantized(site)):
            name = self.skeleton.names.of_block(self.block.index, f"{spec.local}.weight")
            shape = torch.empty(spec.out_features, spec.in_features, device="meta")
            read = partial(self._source, name, shape)
            ahead = is_accelerator(self.skeleton.device)
            sources[spec.local] = reader.submit(read).result if ahead else read
        return sources

    def _source(self, name: str, shape: Tensor) -> Tensor:
        return pinned(self.skeleton.read(name, shape), self.skeleton.device)

    def _problem(self, site: Site, weights: Mapping[str, Tensor], statistics: SiteStatistics) -> tuple:
        """Return the arguments of `solve` for a site. weights: by linear."""
        specs, index, curvatures = self.block.quantized(site), self.block.index, []
        given = [weights[spec.local] for spec in specs]
        if self.curvatures is not None:
            curvatures = [self.curvatures.of(index, spec.local) for spec in specs]
            if self.transformed:
                names = [spec.local for spec in specs]
                curvatures = list(map(self.transformed.curvature, names, curvatures))
        return given, [spec.grid.together(given) for spec in specs], statistics, curvatures

    def _weight(self, spec: LinearSpec) -> Tensor:
        """Return the weight to be quantized, float32 `[out, in]`."""
        exact = self.transformed.exact if self.transformed else {}
        return exact.pop(spec.local, self.skeleton.part(self.block.index, spec.local).weight).float()

    def _installed(
        self, spec: LinearSpec, quantized: QuantizedWeight, weight: Tensor, statistics: SiteStatistics
    ) -> Tensor:
        """Encode, install and stage a linear; return the decoded values. Raises QuantkitError if the layout
        cannot store weights as large as these."""
        if Statistic.PEAK in self.layout.needs:
            quantized = replace(quantized, input_peak=statistics[Statistic.PEAK].amax())
        with self.timings("pack"):
            again = partial(self.parts.parts, spec.name)
            try:
                packed = self.layout.encode(quantized)
                values = self.skeleton.install(spec, self.layout, packed, again)
            except DamagedError as error:  # values were finite before they were encoded
                what = f"{spec.name} has weights up to {weight.abs().max():.3g}: too large for "
                hint = f"keep it in 16 bit: --exclude '{re.escape(spec.name)}$'"
                raise QuantkitError(what + spec.grid.describe(), hint, UNSUPPORTED) from error
            self.parts.add_linear(spec.name, packed)
        return values

    def _record(
        self,
        spec: LinearSpec,
        site: Site,
        statistics: SiteStatistics,
        solved: Solved,
        weight: Tensor,
        values: Tensor,
        source: Tensor | None,
    ) -> dict[str, Any]:
        """Return what the manifest says of a linear, with the error of the stored values, by which a
        checkpoint can be verified against its source. `error` is that of the outputs (see Solved); without a
        Hessian `|dW|² / |W|²` of the stored values.

        source: after a transform, the source's weight as verification will read it: the fit of scales stops
        before the least error, so the scaled weight has another error.
        """
        scaling = self.transformed.facts.get(spec.local, {}) if self.transformed else {}
        size = spec.grid.group_size if spec.in_features % spec.grid.group_size == 0 else spec.in_features
        before, kept = (matrix.reshape(-1, size).any(1) for matrix in (weight, values))
        notes = [*scaling.get("notes", ()), *solved.notes]
        if lost := int((before & ~kept).sum()):
            notes.append(f"{count(lost, 'group')} of weights became 0, too small for {spec.grid.describe()}")
        plain = weight_error(weight, values) if source is None or solved.error is None else None
        record = {
            "name": spec.name,
            "error": plain if solved.error is None else solved.error,
            "rtn_error": scaling.get("rtn_error", solved.rtn_error),
            "fallback": solved.fallback if site.calls else UNREACHED,
            "notes": notes,
        }
        if source is None:
            record["weight_error"] = plain
        else:
            record["weight_error_up_to_scales"] = error_up_to_scales(source.to(values.device).float(), values)
        if site.pool:
            record["tokens"] = statistics.tokens
        if Statistic.PEAK in self.solver.needs:
            record["outlier_columns"] = self.solver.outliers(statistics[Statistic.PEAK])
        return record | ({"scaled": scaling["scaled"]} if "scaled" in scaling else {})


def _gathered(results: dict) -> dict:
    """Return the union of all ranks' dictionaries."""
    return {key: value for of_rank in distributed.all_gather(results) for key, value in of_rank.items()}
