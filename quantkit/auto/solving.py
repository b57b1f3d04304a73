"""Quantizes a unit with the job's solver, after the job's transform, on inputs from quantized blocks.

Only measured candidates are solved. Other candidates are rounded to nearest, which costs little.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.auto.engines import Errors, nearest, solved_outside
from quantkit.auto.job import KEPT_IN, Auto
from quantkit.auto.units import TINY, Unit, measured, usual
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec, Statistic
from quantkit.quantize.calibrate.measure import Measuring
from quantkit.quantize.calibrate.sites import PROBE_TOKENS, Block, Site, find_sites
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.calibrate.view import Transformed
from quantkit.quantize.solvers import loss
from quantkit.quantize.solving import solve
from quantkit.quantize.timings import Timings
from quantkit.quantize.transforms.scaling import ColumnScaling

States = list[Tensor]  # batches of hidden states, `[batch, tokens, hidden]`
Values = Mapping[str, Tensor]  # weights `[out, in]` by the names of linears inside a block
HESSIAN_BYTES = 1 << 30  # maximum of Hessians in memory: many experts are measured in parts
# The loaded block; its transform; statistics of its sites after the transform, without experts.
Loaded = tuple[Block, Transformed, dict[Site, SiteStatistics]]


class Solving:
    """Quantizes the units of a search. batches: token ids, for the inputs of the output matrix. folder:
    stores the usual weights of each block. errors: {unit: errors} of the units measured so far."""

    def __init__(self, auto: Auto, batches: Sequence[Tensor], folder: Path):
        self._job, self._space, self._units = auto.job, auto.space, auto.units
        self._batches, self._folder = batches, folder
        self.errors: dict[str, Errors] = {}
        self._usual_errors: dict[str, dict[str, float]] = {}  # by unit, {usual candidate: error}
        self._usual = {spec.name: usual(unit) for unit in auto.units for spec in unit.specs}
        self._loaded: Loaded | None = None

    def usual(self, index: int, entering: States) -> Values:
        """Return the weights of all units of the loaded block in their usual candidates. entering: hidden
        states before the block. The weights are solved once and stored in a file for later walks."""
        path = self._folder / f"{index}.safetensors"
        if not path.exists():
            values: dict[str, Tensor] = {}
            for unit in self._units:
                if unit.block == index:
                    solved, errors = self._solved(unit, entering, usual(unit))
                    values |= solved
                    self._usual_errors[unit.name] = errors["solved"]
            host = {name: weight.to(KEPT_IN).cpu().contiguous() for name, weight in values.items()}
            save_file(host, path)
        device = self._job.skeleton.device
        return {name: weight.to(device) for name, weight in load_file(path).items()}

    def measured(self, unit: Unit, entering: States) -> Values:
        """Return the weights of a unit's measured candidate. Call `usual` for its block first. entering:
        hidden states before the block."""
        solved, errors = self._solved(unit, entering, measured(unit), unit.candidates)
        errors["solved"] |= self._usual_errors[unit.name]
        self.errors[unit.name] = errors
        return solved

    def _solved(
        self, unit: Unit, entering: States, chosen: str, rounded: Iterable[str] = ()
    ) -> tuple[dict[str, Tensor], Errors]:
        """Return {linear: solved weight} of `chosen`, and errors of `chosen` and `rounded`.

        A transform divides the inputs of a site by s, multiplies the site's columns by s, and divides the
        rows of the linear that produces these inputs. So the job quantizes `diag(f) W diag(s)`. Divided by
        both scales, the quantized values have the same effect in the original block.
        """
        skeleton, index = self._job.skeleton, unit.block
        specs = {spec.local: spec for spec in unit.specs}
        solved: dict[str, Tensor] = {}
        rounding, solving, scale = Counter(), Counter(), 0.0
        for site, statistics, transformed in self._measured(unit, entering):
            names = [name for name in site.linears if name in specs]
            weights = [skeleton.part(index, name).weight.float() for name in names]
            s, rows = transformed.divided_by.get(site, 1), transformed.row_factors
            f = [rows[name][:, None] if name in rows else 1 for name in names]
            weights = [weight * s * factor for weight, factor in zip(weights, f, strict=True)]
            lost = partial(_lost, f, statistics, weights)
            scale += lost([weight * 0 for weight in weights])
            for candidate in rounded:
                pairs = zip(weights, self._grids(specs, names, candidate), strict=True)
                rounding[candidate] += lost([nearest(*pair, statistics.hessian) for pair in pairs])
            grids = self._grids(specs, names, chosen)
            results = solve(self._job.method.solver, weights, grids, statistics)
            values = [result.weight.values() for result in results]
            solving[chosen] += lost(values)
            for name, value, factor in zip(names, values, f, strict=True):
                solved[name] = (value / s / factor).to(skeleton.dtype)
        scale = max(scale, TINY)
        return solved, {
            "nearest": {name: error / scale for name, error in rounding.items()},
            "solved": {name: error / scale for name, error in solving.items()},
        }

    def _grids(self, specs: Mapping[str, LinearSpec], names: Sequence[str], candidate: str) -> list[Grid]:
        return [self._space.grid(specs[name], candidate) for name in names]

    def outside(self, unit: Unit) -> list[Values]:
        """Return the weights of a matrix outside the blocks in its measured candidate: `solved_outside`."""
        self.errors[unit.name], *values = solved_outside(self._job, self._batches, unit, measured(unit))
        return values

    def _measured(self, unit: Unit, entering: States) -> Iterator[tuple[Site, SiteStatistics, Transformed]]:
        """Yield each site of the unit with its Hessian and transform; experts are measured in parts."""
        if self._loaded is None or self._loaded[0].index != unit.block:
            self._loaded = None  # frees the statistics of the previous block
            self._loaded = self._block(unit.block, entering)
        block, transformed, statistics = self._loaded
        names = {spec.local for spec in unit.specs}
        sites = [site for site in block.sites if names.intersection(site.linears)]
        yield from ((site, statistics[site], transformed) for site in sites if site in statistics)
        layers = {site.pool: site for site in block.sites if not site.linears}
        for experts in _in_batches([site for site in sites if site not in statistics]):
            gathered = self._measuring(block, entering).at_once([layers[experts[0].pool], *experts])
            yield from ((site, gathered.pop(site), transformed) for site in experts)

    def _measuring(self, block: Block, entering: States) -> Measuring:
        job = self._job
        given = job.plan.execution, frozenset({Statistic.HESSIAN}), job.request.run.experts, Timings()
        return Measuring(job.skeleton, block, entering, *given, len(entering))

    def _block(self, index: int, entering: States) -> Loaded:
        """Return the block with grids of its usual candidates, its transform and its sites' statistics."""
        skeleton = self._job.skeleton
        module, probe = skeleton.blocks[index], entering[0][:1, :PROBE_TOKENS]
        sites = find_sites(module, lambda: skeleton.run_block(index, probe))
        specs = {spec.local: spec for spec in self._job.specs if spec.block == index}
        for local, spec in specs.items():
            if stored := self._usual.get(spec.name):
                specs[local] = replace(spec, grid=self._space.grid(spec, stored))
        block = Block(index, module, specs, sites, probe)
        measuring = self._measuring(block, entering)
        transformed = _transformed(measuring, self._job.method.transform)
        plain = [site for site in block.chosen if site.pool is None]
        measured = measuring.at_once(plain) if plain else {}
        for site, scale in transformed.divided_by.items():
            measured[site] = measured[site].divided(scale)
        return block, transformed, measured


def _transformed(measuring: Measuring, transform: ColumnScaling | None) -> Transformed:
    """Apply the transform to a block, except experts; return the changes and restore the block."""
    block = measuring.block
    if transform is None or not block.around:
        return Transformed({})
    statistics = measuring.at_once(block.around, transform.sample)
    original = block.module.state_dict()  # the transform replaces parameters
    transformed = transform.apply(measuring.view(statistics))
    block.module.load_state_dict(original, assign=True)
    return replace(transformed, statistics={})


def _lost(
    factors: Sequence[Tensor | int],
    statistics: SiteStatistics,
    weights: Sequence[Tensor],
    values: Sequence[Tensor],
) -> float:
    """Return the error of a site's outputs times its tokens. factors: of each linear's rows, which the
    transform multiplied; the error is that of the outputs without them."""
    triples = zip(factors, weights, values, strict=True)
    deltas = ((value - weight) / factor for factor, weight, value in triples)
    return sum(loss(delta, statistics.hessian) for delta in deltas) * statistics.tokens


def _in_batches(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Yield lists of experts' sites of one layer whose Hessians take at most HESSIAN_BYTES."""
    for _, group in groupby(sites, lambda site: site.pool):
        alike = list(group)
        most = max(1, HESSIAN_BYTES // (4 * alike[0].in_features ** 2))
        yield from (alike[k : k + most] for k in range(0, len(alike), most))
