"""What ranks solve together: a site, of whose linears each has some rows, or several sites of experts, of
which each has some. All of them have the whole result.

Error feedback runs along the columns of a row, so rows of a linear need nothing of one another but the
Hessian's factor, which every rank makes for itself, and the sums by which the solver decides for a linear as
a whole. What cannot be cut (grids whose parameters span the matrix, solvers that look at rows together, few
rows) goes to one rank as it is; on CPUs all does, so that the bytes are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.grids.grid import Grid, stack
from quantkit.models.machine import ranks
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare.fingerprint import differences
from quantkit.quantize.solvers import SiteStatistics, Solved, Solver, clipping

ALONE = "start it without torchrun; several processes serve eval, imatrix, and methods that calibrate"
Solve = Callable[[Solver, Sequence[Tensor], Sequence[Grid], SiteStatistics | None], list[Solved]]
FEWEST = 16  # rows of a linear that are worth a rank's while


def groups(sites: Sequence[Site], independent: bool) -> Iterator[list[Site]]:
    """Sites one by one; of experts, where they are independent, as many at a time as there are ranks."""
    group: list[Site] = []
    for site in sites:
        both = [*group[:1], site]
        alike = site.pool and site.pool == both[0].pool and len(group) < ranks.count()
        free = independent and all(one.linears and one.calls and not one.whole for one in both)
        if group and not (alike and free):
            yield group
            group = []
        group.append(site)
    if group:
        yield group


def each(sites: Sequence[Site], solved: Callable[[Site, Solve], list[Solved]]) -> list[list[Solved]]:
    """What `solved(site, solve)` returns for every site: one is solved by all ranks together, of several each
    rank solves some."""
    if len(sites) == 1:
        return [solved(sites[0], solve)]
    mine = {site.place: solved(site, alone) for site in ranks.dealt(sites)}
    found = {place: results for part in ranks.gathered(mine) for place, results in part.items()}
    return [found[site.place] for site in sites]


def alone(
    solver: Solver, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
) -> list[Solved]:
    """By this rank."""
    return solver.solve(weights, grids, statistics)


def solve(
    solver: Solver, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
) -> list[Solved]:
    """`solver.solve`, by all ranks together; every one of them has all weights, and gets all results."""
    if ranks.count() == 1:
        return solver.solve(weights, grids, statistics)
    numbers = range(len(weights))
    cut = [k for k in numbers if _can_be_cut(solver, weights[k], grids[k])]
    found: dict[int, Solved] = {}
    if cut:
        parts = [weights[k][_rows(weights[k])] for k in cut]
        everyone = ranks.gathered(solver.solve(parts, [grids[k] for k in cut], statistics, ranks.sum_))
        found |= {k: _joined([part[at] for part in everyone]) for at, k in enumerate(cut)}
    whole = [k for k in numbers if k not in cut]
    if whole:  # those of one grid are solved as one matrix: together
        mine = ranks.dealt(list(dict.fromkeys(grids[k] for k in whole)))
        own = [k for k in whole if grids[k] in mine]
        solved = solver.solve([weights[k] for k in own], [grids[k] for k in own], statistics) if own else []
        for part in ranks.gathered(dict(zip(own, solved, strict=True))):
            found |= part
    return [found[k] for k in numbers]


def _can_be_cut(solver: Solver, weight: Tensor, grid: Grid) -> bool:
    """Whether ranks may have some rows each: not where it is to be what one process makes of it, for a
    product of matrices of fewer rows may differ in its last bit, and error feedback is chaotic."""
    enough = len(weight) >= FEWEST * ranks.count()
    return enough and solver.by_rows and not grid.spans_matrix and not ranks.in_order()


def check(method: Method) -> None:
    """Raise QuantkitError for a job that several processes cannot share."""
    if ranks.count() == 1:
        return
    if not method.needs:
        message = f"{method.name} without calibration has nothing that {ranks.count()} processes could share"
        raise QuantkitError(message, ALONE, UNSUPPORTED)
    if "curvature" in method.needs:
        message = f"--solver yaqa does not run as several processes, and {ranks.count()} were started"
        raise QuantkitError(message, "use --solver gptq, or start it without torchrun", UNSUPPORTED)


def check_alike(fingerprint: dict) -> None:
    """Raise QuantkitError unless all ranks have prepared the same job, on like machines: they take every
    decision each for itself, from the same numbers."""
    if ranks.count() == 1:
        return
    mine = {name: value for name, value in fingerprint.items() if name != "source_sha256"}
    mine |= {"processor": torch.backends.cpu.get_cpu_capability()}
    if mine["execution"]["device"] != "cpu":
        mine |= {"GPU": torch.cuda.get_device_name()}
    first, *others = ranks.gathered(mine)
    for rank, other in enumerate(others, 1):
        if different := differences(first, other):
            raise QuantkitError(
                f"rank {rank} has another job than rank 0; different: {name_all(different)}",
                "use like machines, with the same files, options and versions",
                UNSUPPORTED,
            )


def _rows(weight: Tensor) -> slice:
    own = ranks.span(len(weight))
    return slice(own.start, own.stop)


def _joined(parts: Sequence[Solved]) -> Solved:
    """A linear from the rows of all ranks, which are of one mind about all else."""
    first, clipped = parts[0], clipping(parts[0].weight)
    weight = replace(
        first.weight,
        codes=torch.cat([part.weight.codes for part in parts]),
        params=stack([part.weight.params for part in parts]),
    )
    notes = first.notes[: len(first.notes) - len(clipped)] + clipping(weight)
    return replace(first, weight=weight, notes=notes)
