"""Two-sided error feedback: against the dense Kronecker form, and what it promises."""

import pytest
import reference_yaqa as reference
import torch
from nights import by_day
from sums import assert_sums

from quantkit.grids.affine import AffineGrid
from quantkit.grids.fp4 import MxFp4Grid, NvFp4Grid
from quantkit.grids.ggml import named
from quantkit.grids.nf4 import Nf4Grid
from quantkit.layouts import Statistic
from quantkit.quantize.calibrate.statistics import Drift, SiteStatistics, retarget
from quantkit.quantize.solvers import yaqa
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.refine import both_sides
from quantkit.quantize.solvers.yaqa import YaqaSolver, two_sided_loss
from quantkit.quantize.solving import solve

OUT, IN, GROUP = 6, 16, 8


def curved(size: int, seed: int) -> torch.Tensor:
    """Second moments of correlated numbers of unlike sizes."""
    generator = torch.manual_seed(seed)
    rows = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    rows *= torch.rand(size, generator=generator) + 0.3
    return rows.t() @ rows / len(rows)


def problem(out: int = OUT, width: int = IN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(out, width, generator=torch.manual_seed(3)), curved(width, 1), curved(out, 2)


def solved(weight, grid, hessian, curvature, refine=0):
    """Values and scales as the solver finds them."""
    found = YaqaSolver(refine=refine).quantize_both_sides(weight, grid, hessian.clone(), curvature.clone())
    return found.values(), found.params.scale


def expected(weight, grid, hessian, curvature, block, cycles):
    rows, columns = reference.orders(hessian, curvature, GROUP)
    H = reference.damped(hessian, 0.01)[columns][:, columns]
    G = reference.damped(curvature, 0.03)[rows][:, rows]
    ordered = weight[rows][:, columns]
    values, scales = reference.feedback(ordered, grid, H, G, block)
    for _ in range(cycles):
        reference.descend(ordered.double(), grid, H, G, values, scales)
    found, groups = torch.empty_like(weight), torch.empty_like(scales)
    found[torch.tensor(rows)[:, None], torch.tensor(columns)] = values.float()
    places = [column // GROUP for column in columns[::GROUP]]
    groups[torch.tensor(rows)[:, None], torch.tensor(places)] = scales
    return found, groups


@pytest.mark.parametrize(("block", "cycles"), [(1, 0), (4, 0), (1, 2)])
def test_is_the_nearest_plane_of_the_kronecker_form(monkeypatch, block, cycles):
    monkeypatch.setattr(yaqa, "YAQA_ROWS", block)
    monkeypatch.setattr(both_sides, "DESCENT_ROWS", 1)
    grid = AffineGrid(3, GROUP)
    weight, hessian, curvature = problem()
    values, scales = solved(weight, grid, hessian, curvature, cycles)
    wanted = expected(weight, grid, hessian, curvature, block, cycles)
    torch.testing.assert_close(scales, wanted[1], rtol=0, atol=0)
    torch.testing.assert_close(values, wanted[0], rtol=0, atol=1e-6)


GRIDS = AffineGrid(2, 32), AffineGrid(4, 64, False), Nf4Grid(), NvFp4Grid(), MxFp4Grid(), named("Q3_K")


@pytest.mark.parametrize("grid", by_day(GRIDS, [GRIDS[1], GRIDS[3]]))
def test_each_cycle_loses_less(grid):
    """Of the damped loss, with rows that are visited together."""
    width = max(128, grid.group_size)
    weight, hessian, curvature = problem(48, width)
    lost = []
    for cycles in range(4):
        values = YaqaSolver(refine=cycles).quantize_both_sides(weight, grid, hessian, curvature).values()
        H, G = reference.damped(hessian, 0.01).float(), reference.damped(curvature, 0.03).float()
        lost.append(two_sided_loss(values - weight, H, G))
    assert lost[0] > lost[1] > lost[2] >= lost[3]


def test_loses_less_than_one_sided_feedback():
    weight, hessian, curvature = problem(48, 128)
    grid = AffineGrid(3, 32)
    moments = hessian, [curvature, curvature]
    plain = GptqSolver().solve([weight] * 2, [grid] * 2, *moments)
    for one, other in zip(YaqaSolver().solve([weight] * 2, [grid] * 2, *moments), plain, strict=True):
        lost, before = (
            two_sided_loss(found.weight.values() - weight, hessian, curvature) for found in (one, other)
        )
        assert lost < 0.8 * before
        assert one.fallback is None
        assert_sums(one.rtn_error, other.rtn_error)


def test_without_a_gradient_it_is_gptq():
    weight, hessian, _ = problem()
    grid = AffineGrid(3, GROUP)
    moments = hessian, [None]
    (found,) = YaqaSolver().solve([weight], [grid], *moments)
    (plain,) = GptqSolver().solve([weight], [grid], *moments)
    assert found.weight.codes.equal(plain.weight.codes)
    assert found.notes == (yaqa.UNREACHED,)


def test_what_gptq_does_better_stays_gptqs(monkeypatch):
    weight, hessian, curvature = problem()
    grid = AffineGrid(3, GROUP)
    worse = YaqaSolver().quantize_both_sides(weight * 0.5, grid, hessian, curvature)
    monkeypatch.setattr(YaqaSolver, "quantize_both_sides", lambda *_: worse)
    moments = hessian, [curvature]
    (found,) = YaqaSolver().solve([weight], [grid], *moments)
    (plain,) = GptqSolver().solve([weight], [grid], *moments)
    assert found.weight.codes.equal(plain.weight.codes)
    assert "above gptq's" in found.notes[0]


def test_groups_of_zeros_stay_zero():
    weight, hessian, curvature = problem(8, 32)
    weight[2:4, :16] = 0
    found = YaqaSolver().quantize_both_sides(weight, named("Q4_0"), hessian, curvature)
    assert torch.isfinite(found.values()).all()


def test_with_the_original_as_the_target_it_rounds_the_moved_weights():
    """The same codes as of those weights without a drift, in both of its answers."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(600, 32, generator=generator)
    weight, root = torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator)
    drift = torch.stack([half.t() @ half for half in (0.1 * x[:300], 0.1 * x[300:])])
    hessian, curvatures = 2 * x.t() @ x / 600, [root @ root.t()]
    drift = Drift(hessian, drift / 300, outputs=False, tokens=300)
    grid = AffineGrid(3, 16, True)
    moved = retarget([weight], drift, 0.01)
    assert not torch.allclose(moved[0], weight, atol=1e-3)
    statistics = SiteStatistics({Statistic.HESSIAN: hessian, Statistic.DRIFT: drift}, has_prior=True)
    (one,) = solve(YaqaSolver(target="original"), [weight], [grid], statistics, curvatures)
    (other,) = YaqaSolver().solve(moved, [grid], hessian, curvatures)
    assert torch.equal(one.weight.values(), other.weight.values())
    assert_sums(one.error, other.error)
