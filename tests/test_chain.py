"""The kernel that chooses a run of columns, against the paper and against torch's kernels.

It runs on QUANTKIT_DEVICE, or where there is no GPU in Triton's interpreter.
"""

import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from unittest import mock

import accelerator
import pytest
import torch
from reference_gptq import refine as reference_refine
from test_gptq import CASES, problem, settled, started

from quantkit.grids import ggml
from quantkit.grids.affine import AffineGrid
from quantkit.grids.fp4 import MxFp4Grid
from quantkit.grids.nf4 import Nf4Grid
from quantkit.quantize.solvers import columns
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.refine import by_column, refine

DEVICE = torch.device(accelerator.NAME if accelerator.REAL else "cpu")
INTERPRETED = {} if DEVICE.type == "cuda" else {"TRITON_INTERPRET": "1"}
if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if INTERPRETED and "triton" in sys.modules:
    pytest.skip("triton was imported before: run this file alone", allow_module_level=True)
with mock.patch.dict(os.environ, INTERPRETED):  # read when triton is first imported
    from quantkit.quantize.solvers.chain import chain


def literal(targets, levels, coupling, grid):
    """The kernel's choice, column by column."""
    for j in range(targets.shape[1]):
        before, level = levels[:, j].clone(), torch.empty_like(levels[:, j])
        grid.snap(targets[:, j], level)
        targets[:, j + 1 :] -= coupling[:, j, j + 1 :, None] * (level - before)[:, None]
        levels[:, j] = level


@contextmanager
def kernel(run=chain):
    """The solver uses the kernel, or `run`; yields the shapes that it was launched for."""
    shapes = []

    def counted(targets, *arguments):
        shapes.append(tuple(targets.shape))
        run(targets, *arguments)

    def chain_for(device, grid):
        return counted if grid.limits else None

    places = (mock.patch.object(room, "chain_for", chain_for) for room in (columns, by_column))
    with mock.patch.dict(os.environ, INTERPRETED), next(places), next(places):
        yield shapes


def solved(weight: torch.Tensor, hessian: torch.Tensor, grid, **options):
    """The weight, on the CPU, and its error."""
    (found,) = GptqSolver(**options).solve([weight.to(DEVICE)], [grid], hessian.to(DEVICE))
    assert found.fallback is None
    return found.weight.codes.cpu(), found.weight.values().cpu(), found.error


@pytest.mark.parametrize("in_features, grid", [CASES[k] for k in (0, 3, 5, 7)])
def test_the_sweep_is_the_papers_algorithm(in_features, grid):
    weight, hessian, expected = settled(in_features, grid, "none")
    with kernel(), accelerator.exact_products():
        codes, values, _ = solved(weight, hessian, grid, act_order="none", refine=0)
    assert torch.equal(codes, expected.codes)
    torch.testing.assert_close(values, expected.values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("in_features, grid", [(96, AffineGrid(3, 32)), (128, AffineGrid(3, 64, False))])
def test_the_refinement_is_coordinate_descent(in_features, grid):
    """Against the literal one, group by group."""
    weight, _, hessian = problem(in_features, rows=4)
    quantized, chosen = started(weight, grid, hessian)
    expected, losses = reference_refine(weight, quantized, hessian, cycles=2, run=grid.group_size, alone=True)
    chosen.E, chosen.codes, chosen.lost = (x.to(DEVICE) for x in (chosen.E, chosen.codes, chosen.lost))
    chosen.params = [type(each)(*(x.to(DEVICE) for x in vars(each).values())) for each in chosen.params]
    with kernel():
        refine(weight.t().contiguous().to(DEVICE), chosen, grid, hessian.to(DEVICE), 2)
    assert torch.equal(chosen.codes.cpu().t(), expected.codes)
    torch.testing.assert_close(chosen.lost.cpu().double(), losses[-1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "grid",
    [AffineGrid(4, 128), AffineGrid(3, 32, False), Nf4Grid(), MxFp4Grid(), ggml.named("Q4_K")],
    ids=lambda grid: type(grid).__name__ + str(grid.bits),
)
def test_it_chooses_what_torchs_kernels_choose(grid):
    """It adds up in another order, so ties may fall otherwise."""
    weight, _, hessian = problem(512, rows=20)
    with kernel(literal):
        plain = solved(weight, hessian, grid)
    with kernel() as shapes:
        found = solved(weight, hessian, grid)
    assert shapes and (plain[0] == found[0]).float().mean() > 0.97
    assert found[2] == pytest.approx(plain[2], rel=5e-3)


def test_it_is_launched_once_for_a_group():
    weight, _, hessian = problem(256, rows=4)
    with kernel() as shapes:
        solved(weight, hessian, AffineGrid(4, 128), refine=1)
    assert shapes == [(1, 128, 4)] * 4, "two in the sweep, two in the refinement"


def test_experts_are_one_launch():
    weight, _, hessian = problem(128, rows=4)
    grid, solver = AffineGrid(4, 128), GptqSolver(refine=1, target="own")
    site = [weight.to(DEVICE)], [grid], hessian.to(DEVICE)
    with kernel() as shapes:
        together = solver.solve_many([site] * 3)
        alone = solver.solve(*site)
    assert shapes[:2] == [(3, 128, 4)] * 2
    for (found,) in together:
        assert torch.equal(found.weight.codes, alone[0].weight.codes)
