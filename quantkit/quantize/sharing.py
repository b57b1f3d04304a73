"""Deal linears and experts to ranks. Each rank solves its share; then all hold the whole result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.grids.grid import Grid
from quantkit.models.machine import distributed
from quantkit.quantize.calibrate.sites import Site
from quantkit.quantize.methods import Method
from quantkit.quantize.prepare.fingerprint import differences
from quantkit.quantize.solvers import SiteStatistics, Solved, Solver

ALONE = "start it without torchrun; several processes serve eval, imatrix, and methods that calibrate"
Solve = Callable[[Solver, Sequence[Tensor], Sequence[Grid], SiteStatistics | None], list[Solved]]


def groups(sites: Sequence[Site], independent: bool) -> Iterator[list[Site]]:
    """Yield sites one by one; of experts, where they are independent, as many at once as there are ranks."""
    group: list[Site] = []
    for site in sites:
        both = [*group[:1], site]
        alike = site.pool and site.pool == both[0].pool and len(group) < distributed.count()
        free = independent and all(one.linears and one.calls and not one.whole for one in both)
        if group and not (alike and free):
            yield group
            group = []
        group.append(site)
    if group:
        yield group


def each(sites: Sequence[Site], solved: Callable[[Site, Solve], list[Solved]]) -> list[list[Solved]]:
    """Return what `solved(site, solve)` does for every site: one is solved by all ranks together, of several
    each rank solves some."""
    if len(sites) == 1:
        return [solved(sites[0], solve)]
    mine = {site.place: solved(site, alone) for site in distributed.dealt(sites)}
    found = {place: results for part in distributed.all_gather(mine) for place, results in part.items()}
    return [found[site.place] for site in sites]


def alone(
    solver: Solver, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
) -> list[Solved]:
    """Return what `solver.solve` does, on this rank."""
    return solver.solve(weights, grids, statistics)


def solve(
    solver: Solver, weights: Sequence[Tensor], grids: Sequence[Grid], statistics: SiteStatistics | None
) -> list[Solved]:
    """Return what `solver.solve` does, by all ranks: each solves some linears, largest first."""
    if distributed.count() == 1:
        return solver.solve(weights, grids, statistics)
    largest = sorted(range(len(weights)), key=lambda k: -weights[k].numel())
    own = distributed.dealt(largest)
    solved = solver.solve([weights[k] for k in own], [grids[k] for k in own], statistics) if own else []
    parts = distributed.all_gather(dict(zip(own, solved, strict=True)))
    found = {k: result for part in parts for k, result in part.items()}
    return [found[k] for k in range(len(weights))]


def check(method: Method) -> None:
    """Raise QuantkitError for a job that several processes cannot share."""
    if distributed.count() == 1:
        return
    if not method.needs:
        message = (
            f"{method.name} without calibration has nothing that {distributed.count()} processes could share"
        )
        raise QuantkitError(message, ALONE, UNSUPPORTED)
    if "curvature" in method.needs:
        message = f"--solver yaqa does not run as several processes, and {distributed.count()} were started"
        raise QuantkitError(message, "use --solver gptq, or start it without torchrun", UNSUPPORTED)


def check_alike(fingerprint: dict) -> None:
    """Raise QuantkitError unless all ranks have prepared the same job, on like machines: they take every
    decision each for itself, from the same numbers."""
    if distributed.count() == 1:
        return
    mine = {name: value for name, value in fingerprint.items() if name != "source_sha256"}
    mine |= {"processor": torch.backends.cpu.get_cpu_capability()}
    if mine["execution"]["device"] != "cpu":
        mine |= {"GPU": torch.cuda.get_device_name()}
    first, *others = distributed.all_gather(mine)
    for rank, other in enumerate(others, 1):
        if different := differences(first, other):
            raise QuantkitError(
                f"rank {rank} has another job than rank 0; different: {name_all(different)}",
                "use like machines, with the same files, options and versions",
                UNSUPPORTED,
            )
