"""The experiments of scripts/sweep against the paper and against the plain sweep: nothing of them is used."""

import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from reference_gptq import refine as reference_refine
from test_gptq import CASES, problem, settled, started

from quantkit.grids.affine import AffineGrid
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.refine import refine as plain_refine

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from sweep import graph, interpreter  # noqa: E402

DEVICE = torch.device(os.environ.get("QUANTKIT_DEVICE", "cpu").replace("far", "cpu"))
with mock.patch.dict(os.environ):  # no other process is to inherit the interpreter
    ABSENT = interpreter.unavailable(DEVICE.type)
    INTERPRETED = {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ}
    if not ABSENT:  # imported at once: later something else may have imported triton without its interpreter
        from sweep import triton_sweep


@contextmanager
def kernel():
    """The solver uses the kernel, which numpy runs where there is no GPU."""
    if ABSENT:
        pytest.skip(f"the kernel cannot run: {ABSENT}")
    with mock.patch.dict(os.environ, INTERPRETED), triton_sweep.plugged(block=4):
        yield


WAYS = {"plain": nullcontext, "graph": graph.plugged, "triton": kernel}


def solved(way: str, weight: torch.Tensor, hessian: torch.Tensor, grid: AffineGrid, **options):
    """The weight, on the CPU, and its error."""
    with WAYS[way]():
        statistics = SiteStatistics(hessian.to(DEVICE))
        (found,) = GptqSolver(**options).solve([weight.to(DEVICE)], [grid], statistics)
    assert found.fallback is None
    return found.weight.codes.cpu(), found.weight.values().cpu(), found.error


@pytest.mark.parametrize("way", ["graph", "triton"])
@pytest.mark.parametrize("in_features, grid", [CASES[k] for k in (0, 3, 5, 7)])
def test_the_sweep_is_the_papers_algorithm(way, in_features, grid):
    weight, hessian, expected = settled(in_features, grid, "none")
    codes, values, _ = solved(way, weight, hessian, grid, act_order="none", refine=0)
    assert torch.equal(codes, expected.codes)
    torch.testing.assert_close(values, expected.values(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["graph", "triton"])
@pytest.mark.parametrize("in_features, grid", [(96, AffineGrid(3, 32)), (128, AffineGrid(3, 64, False))])
def test_the_refinement_is_coordinate_descent(way, in_features, grid):
    """Against the literal one; of three groups one has no partner, a group of 64 has two runs."""
    weight, _, hessian = problem(in_features, rows=4)
    quantized, chosen = started(weight, grid, hessian)
    expected, losses = reference_refine(weight, quantized, hessian, cycles=2)
    refine = graph.Graphs().refine if way == "graph" else plain_refine
    with WAYS[way]():
        refine(weight.t().contiguous(), chosen, grid, hessian.clone(), 2)
    assert torch.equal(chosen.codes.t(), expected.codes)
    torch.testing.assert_close(chosen.lost.double(), losses[-1], rtol=1e-4, atol=0)


@pytest.mark.parametrize("way", ["graph", "triton"])
def test_sweep_and_refinement_are_the_plain_ones(way):
    """Bit for bit if captured; the kernel adds up in another order, so ties may fall otherwise."""
    weight, _, hessian = problem(384, rows=4)
    grid = AffineGrid(4, 128)
    plain, found = (solved(each, weight, hessian, grid) for each in ("plain", way))
    same = (plain[0] == found[0]).float().mean().item()
    assert same == 1 if way == "graph" else same > 0.99
    assert found[2] == pytest.approx(plain[2], rel=0 if way == "graph" else 1e-3)


def test_the_kernel_is_launched_once_for_a_group_and_once_for_a_run(monkeypatch):
    weight, _, hessian = problem(256, rows=4)
    launched = []
    with kernel():
        run = triton_sweep.run_chain

    def counted(targets, *arguments):
        launched.append(tuple(targets.shape))
        run(targets, *arguments)

    monkeypatch.setattr(triton_sweep, "run_chain", counted)
    solved("triton", weight, hessian, AffineGrid(4, 128), refine=1)
    assert launched == [(1, 128, 4)] * 2 + [(2, 32, 4)] * 4


def test_groups_of_the_same_shape_are_captured_once():
    """Of three groups: their sweep, the visit of two, and that of the one without a partner."""
    weight, _, hessian = problem(384, rows=4)
    with graph.plugged() as graphs:
        statistics = SiteStatistics(hessian.to(DEVICE))
        GptqSolver().solve([weight.to(DEVICE)], [AffineGrid(4, 128)], statistics)
    assert [(key[0], key[1]) for key in graphs.kept] == [("sweep", 4), ("visit", 2), ("visit", 1)]
