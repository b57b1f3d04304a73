"""Launches of methods on the double of an accelerator (far_device.py), and a problem that all solvers take.

A column of a solve is a few hundred nanoseconds of arithmetic on a GPU; what it costs is the launches. `none`
leaves out the default `--transform auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from far_device import DEVICE, FAR

from quantkit.grids.affine import AffineGrid
from quantkit.grids.grid import Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.layouts import Statistic
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.solvers import Solver
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.rtn import RtnSolver
from quantkit.quantize.transforms.auto import FeedbackScaling
from quantkit.quantize.transforms.awq import search
from quantkit.quantize.transforms.scaling import Losses, Reader

Run = Callable[[torch.Tensor, SiteStatistics], object]


def solved(solver: Solver, grid: Grid) -> Run:
    return lambda weight, statistics: solver.solve([weight], [grid], statistics.hessian)


def reader(weight: torch.Tensor, grid: Grid, statistics: SiteStatistics) -> Reader:
    return Reader(weight, grid, statistics.hessian, weight.new_ones(len(weight)))


def scaled(weight: torch.Tensor, statistics: SiteStatistics) -> None:
    """AWQ's search for a scale, 20 exponents."""
    losses = Losses([reader(weight, AffineGrid(4, 128, search=False), statistics)])
    search(losses, statistics[Statistic.MAGNITUDE], 20)


def solved_as_by_default(weight: torch.Tensor, statistics: SiteStatistics) -> None:
    """`--transform auto`: the search of a scale by error feedback, then the solve."""
    solver, grid = GptqSolver(), AffineGrid(4, 128)
    scaling = FeedbackScaling(solver)
    losses = scaling.losses([reader(weight, grid, statistics)])
    scaling.search(losses, SimpleNamespace(tied=lambda scale: scale), ())
    solver.solve([weight], [grid], statistics.hessian)


METHODS: dict[str, Run] = {
    "gptq": solved_as_by_default,
    "gptq --transform none": solved(GptqSolver(), AffineGrid(4, 128)),
    "gptq --refine 0, none": solved(GptqSolver(refine=0), AffineGrid(4, 128)),
    "nf4 --solver gptq": solved(GptqSolver(), Nf4Grid()),
    "awq: scales": scaled,
    "awq: clipping": solved(RtnSolver(weighted=True), AffineGrid(4, 128, search=False, clip=True)),
}


def problem(
    rows: int, columns: int, seed: int = 0, device: torch.device = FAR
) -> tuple[torch.Tensor, SiteStatistics]:
    """Return a weight `[rows, columns]` and statistics of correlated inputs, on the device."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(2 * columns, columns, generator=generator)
    inputs *= torch.rand(columns, generator=generator) + 0.1
    inputs[:, 1:] += 0.5 * inputs[:, :-1]
    hessian = 2 * inputs.T @ inputs / len(inputs)
    values = {Statistic.HESSIAN: hessian, Statistic.MAGNITUDE: inputs.abs().mean(0)}
    return weight.to(device), SiteStatistics(
        {kind: value.to(device) for kind, value in values.items()}, len(inputs)
    )


def count(run: Run, rows: int, columns: int) -> tuple[int, int]:
    """Return launches and waits of one linear; constants are on the device already."""
    for _ in range(2):
        weight, statistics = problem(rows, columns)
        DEVICE.reset()
        DEVICE.here = True
        run(weight, statistics)
    return DEVICE.launches.total(), DEVICE.syncs.total()
