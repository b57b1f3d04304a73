"""Count the kernels that each method launches on an accelerator, a column and a block of Llama-3-8B.

    python scripts/bench_launches.py [--columns 1024 --rows 64 --microseconds 5]

A column of a solve is a few hundred nanoseconds of arithmetic on a GPU; what it costs is the launches.
`none` leaves out the default `--transform auto`.
Launches are counted on the tests' double of an accelerator (tests/far_device.py), for one linear, and again
with twice the rows: a count that grew with them would say so. The sum is over the inputs of the linears of
all blocks of Llama-3-8B (for gptq over those of its sites, which are solved together), and an estimate:
launches of small kernels, one after another, at so many microseconds each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from far_device import DEVICE, FAR  # noqa: E402

from quantkit.grids import ggml  # noqa: E402
from quantkit.grids.affine import AffineGrid  # noqa: E402
from quantkit.grids.grid import Grid  # noqa: E402
from quantkit.grids.nf4 import Nf4Grid  # noqa: E402
from quantkit.layouts import Statistic  # noqa: E402
from quantkit.quantize.calibrate.statistics import SiteStatistics  # noqa: E402
from quantkit.quantize.solvers import Solver  # noqa: E402
from quantkit.quantize.solvers.gptq import GptqSolver  # noqa: E402
from quantkit.quantize.solvers.rtn import RtnSolver  # noqa: E402
from quantkit.quantize.transforms.auto import FeedbackScaling  # noqa: E402
from quantkit.quantize.transforms.awq import search  # noqa: E402
from quantkit.quantize.transforms.scaling import Losses, Reader  # noqa: E402

BLOCKS = 32
SITES = {4096: 3, 14336: 1}  # inputs: sites of a block (q/k/v, o, gate/up; down)
LINEARS = {4096: 6, 14336: 1}

Run = Callable[[torch.Tensor, SiteStatistics], object]


def solved(solver: Solver, grid: Grid) -> Run:
    return lambda weight, statistics: solver.solve([weight], [grid], statistics.hessian)


def scaled(weight: torch.Tensor, statistics: SiteStatistics) -> None:
    """AWQ's search for a scale, 20 exponents."""
    losses = Losses([Reader(weight, AffineGrid(4, 128, search=False), statistics.hessian)])
    search(losses, statistics[Statistic.MAGNITUDE], 20)


def solved_as_by_default(weight: torch.Tensor, statistics: SiteStatistics) -> None:
    """`--transform auto`: the search of a scale by error feedback, then the solve."""
    solver, grid = GptqSolver(), AffineGrid(4, 128)
    scaling = FeedbackScaling(solver)
    losses = scaling.losses([Reader(weight, grid, statistics.hessian)])
    scaling.search(losses, SimpleNamespace(tied=lambda scale: scale), ())
    solver.solve([weight], [grid], statistics.hessian)


def solved_together(experts: int) -> Run:
    """Experts of one shape as a batch."""

    def run(weight: torch.Tensor, statistics: SiteStatistics) -> None:
        GptqSolver().solve_many([([weight], [AffineGrid(4, 128)], statistics.hessian)] * experts)

    return run


def encoded(name: str) -> Run:
    grid = ggml.named(name)
    return lambda weight, statistics: grid.quantize(weight, statistics[Statistic.SQUARE])


METHODS: dict[str, tuple[Run, dict[int, int]]] = {
    "gptq": (solved_as_by_default, SITES),
    "gptq --transform none": (solved(GptqSolver(), AffineGrid(4, 128)), SITES),
    "gptq --no-sym, none": (solved(GptqSolver(), AffineGrid(4, 128, symmetric=False)), SITES),
    "gptq --group-size 32, none": (solved(GptqSolver(), AffineGrid(4, 32)), SITES),
    "gptq --group-size -1, none": (solved(GptqSolver(), AffineGrid(4, 0)), SITES),
    "gptq --refine 0, none": (solved(GptqSolver(refine=0), AffineGrid(4, 128)), SITES),
    "nf4 --solver gptq": (solved(GptqSolver(), Nf4Grid()), SITES),
    "Q4_K --solver gptq": (solved(GptqSolver(), ggml.named("Q4_K")), SITES),
    "Q3_K --solver gptq": (solved(GptqSolver(), ggml.named("Q3_K")), SITES),
    "awq: scales": (scaled, LINEARS),
    "awq: clipping": (solved(RtnSolver(weighted=True), AffineGrid(4, 128, search=False, clip=True)), LINEARS),
    "gptq --solver rtn": (solved(RtnSolver(), AffineGrid(4, 128)), LINEARS),
    "nf4": (solved(RtnSolver(), Nf4Grid()), LINEARS),
    "Q4_K --solver rtn": (encoded("Q4_K"), LINEARS),
    "Q6_K --solver rtn": (encoded("Q6_K"), LINEARS),
}


def problem(
    rows: int, columns: int, seed: int = 0, device: torch.device = FAR
) -> tuple[torch.Tensor, SiteStatistics]:
    """A weight `[rows, columns]` and statistics of correlated inputs, on the device."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(2 * columns, columns, generator=generator)
    inputs *= torch.rand(columns, generator=generator) + 0.1
    inputs[:, 1:] += 0.5 * inputs[:, :-1]
    hessian = 2 * inputs.T @ inputs / len(inputs)
    values = {
        Statistic.HESSIAN: hessian,
        Statistic.MAGNITUDE: inputs.abs().mean(0),
        Statistic.SQUARE: inputs.square().mean(0),
    }
    return weight.to(device), SiteStatistics({kind: value.to(device) for kind, value in values.items()})


def count(run: Run, rows: int, columns: int) -> tuple[int, int, str]:
    """Launches and waits of one linear, and what is launched most; constants are on the device already."""
    for _ in range(2):
        weight, statistics = problem(rows, columns)
        DEVICE.reset()
        DEVICE.here = True
        run(weight, statistics)
        launches, waits = DEVICE.launches.total(), DEVICE.syncs.total()
        common = ", ".join(f"{name} {n / columns:.2f}" for name, n in DEVICE.launches.most_common(5))
    return launches, waits, common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--microseconds", type=float, default=5.0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'':24}{'a column':>9}{'rows x 2':>9}{'waits':>7}{'Llama-3-8B':>13}"
        f"{f'at {args.microseconds:g} us':>12}  most"
    )
    with torch.inference_mode():
        for name in args.methods:
            run, inputs = METHODS[name]
            if "-1" in name:
                run = solved(GptqSolver(), AffineGrid(4, args.columns))
            launches, waits, common = count(run, args.rows, args.columns)
            doubled, *_ = count(run, 2 * args.rows, args.columns)
            whole = BLOCKS * sum(size * number for size, number in inputs.items()) * launches / args.columns
            print(
                f"{name:24}{launches / args.columns:9.2f}{doubled / args.columns:9.2f}{waits:7}{whole:13,.0f}"
                f"{whole * args.microseconds / 1e6:10.1f} s  {common}"
            )
        for experts in (1, 8, 64):
            launches, waits, _ = count(solved_together(experts), 256, 256)
            print(f"{experts:2} experts of 256 x 256 {launches / 256:9.2f}{'':9}{waits:7}")


if __name__ == "__main__":
    main()
