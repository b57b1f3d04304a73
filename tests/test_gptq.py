"""quantize.solvers.gptq against the paper (reference_gptq.py), against round to nearest, and at its edges.

`refine=0` is the paper's algorithm and no more; the default adds cycles of coordinate descent.
"""

import re
from dataclasses import replace
from itertools import count, product

import pytest
import torch
from nights import by_day, nightly
from reference_gptq import gptq as reference
from reference_gptq import order_of
from reference_gptq import refine as reference_refine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.grids import ggml
from quantkit.grids.affine import AffineGrid
from quantkit.grids.fp4 import MxFp4Grid, NvFp4Grid
from quantkit.grids.ggml import iquants
from quantkit.grids.grid import Grid, QuantizedWeight, group, join
from quantkit.grids.nf4 import Nf4Grid
from quantkit.models.gguf.file_types import NO_FEEDBACK
from quantkit.quantize.solvers import gptq, rtn
from quantkit.quantize.solvers.columns import Chosen
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.solvers.hessian import damped, factorize
from quantkit.quantize.solvers.refine import by_column, refine
from quantkit.quantize.solvers.rtn import RtnSolver

ORDERS = ("none", "group", "full")


def problem(in_features: int, rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """W `[rows, in]`, correlated X `[4 * in, in]` with columns of unlike size, H = 2 XᵀX / tokens."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, in_features, generator=generator)
    mix = torch.eye(in_features) + torch.randn(in_features, in_features, generator=generator) * (
        1.5 / in_features**0.5
    )
    inputs = torch.randn(4 * in_features, in_features, generator=generator) @ mix
    inputs *= 0.1 + 2 * torch.rand(in_features, generator=generator)
    return weight, inputs, 2 * inputs.T @ inputs / len(inputs)


def settled(in_features: int, grid: AffineGrid, act_order: str, rows: int = 4):
    """A problem whose answer does not hang on the last digits of float32, and that answer.

    Some value always lies next to a rounding boundary sooner or later, and error feedback spreads
    what happens there; seeds are tried until moving W by 1e-5 leaves every code and scale as it was.
    """
    for seed in count():
        weight, _, hessian = problem(in_features, rows, seed)
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 1)).double()
        expected = reference(weight, hessian, grid, act_order=act_order)
        moved = reference(weight.double() + 1e-5 * noise, hessian, grid, act_order=act_order)
        if torch.equal(expected.values(), moved.values()):
            return weight, hessian, expected
        assert seed < 20, "no settled problem found"


def loss(delta: Tensor, hessian: Tensor) -> float:
    """`tr(dW H dWᵀ)`, literally."""
    return torch.trace(delta.double() @ hessian.double() @ delta.double().T).item()


class Made(TorchDispatchMode):
    """Counts the tensors of at least `size` values that operations allocate."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.seen, self.kept = size, set(), []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}
        result = op(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple) else (result,):
            if isinstance(made, Tensor) and made.numel() >= self.size:
                storage = made.untyped_storage()
                if storage.data_ptr() not in known | self.seen:
                    self.kept.append(storage)  # so that no other takes its address
                    self.seen.add(storage.data_ptr())
        return result


CASES = [  # in_features, grid; the solver's blocks are 128 columns
    (64, AffineGrid(4, 8, symmetric=False)),
    (136, AffineGrid(8, 8, symmetric=True, search=False)),  # one group in the second block
    (96, AffineGrid(3, 32, symmetric=True, search=False)),
    (160, AffineGrid(4, 32, symmetric=True, search=False)),
    (128, AffineGrid(2, 16, symmetric=False, zero_min=1)),
    (192, AffineGrid(4, 96, symmetric=False)),  # blocks of 96
    (256, AffineGrid(3, 64, symmetric=False)),  # two groups a block, two runs a group
    (256, AffineGrid(4, 128)),  # the default
    (384, AffineGrid(3, 192, symmetric=False)),  # groups wider than a block
    (320, AffineGrid(2, 320, symmetric=False)),  # one group, the third block half full
    (384, AffineGrid(4, 384)),
]


SWEEPS = [(*case, act_order) for case in CASES for act_order in ORDERS]
ONCE = {1: "none", 7: "group", 8: "full"}  # the widest, and the one of most groups, in one order
DAY = [
    (*case, act_order)
    for number, case in enumerate(CASES[:9])
    for act_order in ORDERS
    if act_order == ONCE.get(number, act_order)
]


@pytest.mark.parametrize("in_features, grid, act_order", by_day(SWEEPS, DAY))
def test_sweep_is_the_papers_algorithm(in_features, grid, act_order):
    weight, hessian, expected = settled(in_features, grid, act_order)
    (solved,) = GptqSolver(act_order=act_order, refine=0).solve([weight], [grid], hessian)
    assert solved.fallback is None and solved.notes == ()
    assert torch.equal(solved.weight.codes, expected.codes)
    if act_order != "group":  # there the solver numbers the groups by their place, here by their turn
        assert torch.equal(solved.weight.group_of_columns(), expected.group_of_columns())
    torch.testing.assert_close(solved.weight.values(), expected.values(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def site():
    return problem(256, rows=16)


@pytest.mark.parametrize("bits, group_size", [(2, 16), (4, 64), (4, -1), *nightly((2, 64), (2, -1), (4, 16))])
def test_beats_rtn_and_tells_its_error(site, bits, group_size):
    weight, inputs, hessian = site
    group_size = 256 if group_size == -1 else group_size
    for symmetric, act_order in product((True, False), ORDERS):
        grid = AffineGrid(bits, group_size, symmetric)
        (baseline,) = RtnSolver().solve([weight], [grid], None)
        (swept,) = GptqSolver(act_order=act_order, refine=0).solve([weight], [grid], hessian)
        (solved,) = GptqSolver(act_order=act_order).solve([weight], [grid], hessian)
        cell = f"symmetric={symmetric} act_order={act_order}"
        assert solved.fallback is None and swept.fallback is None, cell

        delta, baseline_delta = solved.weight.values() - weight, baseline.weight.values() - weight
        baseline_norm = (inputs @ baseline_delta.T).norm()
        assert (inputs @ (swept.weight.values() - weight).T).norm() < 0.9 * baseline_norm, cell
        assert (inputs @ delta.T).norm() < 0.9 * baseline_norm, cell
        assert solved.error < swept.error, cell
        scale = loss(weight, hessian)
        assert solved.error == pytest.approx(loss(delta, hessian) / scale, rel=1e-4), cell
        assert solved.rtn_error == pytest.approx(loss(baseline_delta, hessian) / scale, rel=1e-4), cell

        order = torch.tensor(order_of(hessian.diagonal().tolist(), group_size, act_order))
        trivial = torch.arange(256) // group_size
        if act_order == "full":  # the k-th column quantized belongs to group k // group_size
            assert torch.equal(solved.weight.group_of_columns()[order], trivial), cell
            assert group_size == 256 or not torch.equal(solved.weight.group_of_columns(), trivial), cell
        else:
            assert torch.equal(solved.weight.group_of_columns(), trivial), cell


@pytest.mark.parametrize("act_order", ORDERS)
def test_solving_leaves_its_arguments_as_they_are(site, act_order):
    weight, _, hessian = site
    before = weight.clone(), hessian.clone()
    GptqSolver(act_order=act_order).solve([weight], [AffineGrid(4, 256)], hessian)
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])


def test_ordering_columns_pays(site):
    weight, _, hessian = site
    none, group, full = (
        GptqSolver(act_order=order, refine=0).solve([weight], [AffineGrid(4, 64)], hessian)[0].error
        for order in ORDERS
    )
    assert full < group < none


def started(weight: Tensor, grid: Grid, hessian: Tensor) -> tuple[QuantizedWeight, Chosen]:
    """Rounded to nearest, as a result and as where a refinement starts."""
    quantized = rtn.quantize(weight, grid)
    delta = weight - quantized.values()
    lost = (delta @ hessian * delta).sum(1)
    params = [group(quantized.params, k) for k in range(weight.shape[1] // grid.group_size)]
    return quantized, Chosen(quantized.codes.t().contiguous(), delta.t().contiguous(), params, lost)


@pytest.mark.parametrize(
    "in_features, grid",
    [
        (64, AffineGrid(4, 16, False)),
        (96, AffineGrid(3, 32)),  # three groups: one without a partner
        (128, AffineGrid(3, 64, False)),  # two runs a group
        (192, AffineGrid(2, 192, False)),
    ],
)
def test_refinement_is_coordinate_descent(in_features, grid):
    """Against the literal one."""
    weight, _, hessian = problem(in_features, rows=4)
    before = None
    for cycles in (1, 2):
        quantized, chosen = started(weight, grid, hessian)
        refine(weight.t().contiguous(), chosen, grid, hessian.clone(), cycles)
        expected, losses = reference_refine(weight, quantized, hessian, cycles)
        refined = QuantizedWeight(grid, chosen.codes.t().contiguous(), join(chosen.params), None)
        assert torch.equal(refined.codes, expected.codes)
        torch.testing.assert_close(refined.values(), expected.values(), rtol=0, atol=1e-5)
        torch.testing.assert_close(weight - refined.values(), chosen.E.t(), rtol=0, atol=1e-5)
        torch.testing.assert_close(chosen.lost.double(), losses[-1], rtol=1e-4, atol=0)
        for one, other in zip(losses, losses[1:], strict=False):
            assert (other <= one * (1 + 1e-9)).all()
        after = loss(refined.values() - weight, hessian)
        assert after < 0.95 * (before or loss(quantized.values() - weight, hessian))
        before = after / 0.95


GRIDS = [
    *(AffineGrid(bits, 32, symmetric) for bits, symmetric in product((2, 3, 4, 8), (True, False))),
    AffineGrid(3, 512),
    Nf4Grid(),
    Nf4Grid(double_quant=False),
    NvFp4Grid(divisor=64.0),
    MxFp4Grid(),
    *(ggml.named(name) for name in ggml.TYPES if name not in (*NO_FEEDBACK, *iquants.GRIDS)),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.describe())
def test_refinement_never_raises_the_loss_of_a_row(grid):
    """Inputs so alike that what two groups gain by themselves they would often lose together."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 512, generator=generator) * torch.logspace(-3, 0, 24)[:, None]
    inputs = torch.randn(700, 512, generator=generator) + 3 * torch.randn(700, 1, generator=generator)
    hessian = 2 * inputs.T @ inputs / 700 + 0.05 * torch.eye(512)
    quantized, chosen = started(weight, grid, hessian)
    before = (weight - quantized.values()).double()
    losses = [(before @ hessian.double() * before).sum(1)]
    for _ in range(3):
        refine(weight.t().contiguous(), chosen, grid, hessian.clone(), 1)
        stored = QuantizedWeight(grid, chosen.codes.t().contiguous(), join(chosen.params)).values()
        delta = (weight - stored).double()
        losses.append((delta @ hessian.double() * delta).sum(1))
        assert (losses[-1] <= losses[-2] * (1 + 1e-4)).all()  # float32's own rounding
        torch.testing.assert_close(chosen.lost.double(), losses[-1], rtol=2e-3, atol=0)
    assert losses[-1].sum() < 0.8 * losses[0].sum()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_refinement_finds_the_best_scale_and_min_of_a_sub_block(monkeypatch, name):
    """Of the sub-block that comes last, where nothing else moves: no other scale loses less, or with a min no
    other min with this scale."""
    grid = ggml.named(name)
    weight, _, hessian = problem(256, rows=16)
    quantized, chosen = started(weight, grid, hessian)
    monkeypatch.setattr(by_column._Visit, "_descend", lambda visit: None)
    monkeypatch.setattr(type(grid), "scaled", lambda grid, params, factor: params)
    refine(weight.t().contiguous(), chosen, grid, hessian.clone(), 1)
    (params,) = chosen.params
    field = "mins" if grid.has_min else "scales"
    found, was = (getattr(part, field)[:, -1] for part in (params, group(quantized.params, 0)))
    losses = []
    lowest, highest = grid.scale_range
    for number in range(lowest, highest + 1):
        tried = getattr(params, field).clone()
        tried[:, -1] = number
        stored = QuantizedWeight(grid, quantized.codes, join([replace(params, **{field: tried})]))
        delta = (weight - stored.values()).double()
        losses.append((delta @ hessian.double() * delta).sum(1))
    losses = torch.stack(losses)
    lost = losses.gather(0, (found - lowest).long()[None])[0]
    assert (lost <= losses.amin(0) * (1 + 1e-5)).all()
    assert (found != was).sum() > 2  # it does something
    torch.testing.assert_close(chosen.lost.double(), lost, rtol=1e-3, atol=0)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.describe())
def test_a_column_is_rounded_as_the_group_is(grid):
    """Counted in steps, the nearest levels are the codes that `round` finds; at a midpoint either may be."""
    weight, _, _ = problem(512, rows=32)
    weight[3] = 0
    span = weight[:, : grid.group_size].contiguous()
    params = grid.fit(span)
    step, low = (part.repeat_interleave(grid.sub_size, 0) for part in grid.steps(params))
    target = (span.t() + low) / step
    levels = torch.empty_like(target)
    grid.snap(target, levels)
    codes = torch.empty(levels.shape, dtype=torch.uint8)
    grid.codes(levels, codes)
    assert torch.equal(grid.levels(codes), levels)
    values, nearest = levels * step - low, grid.nearest(span.clone(), params).t()
    torch.testing.assert_close(values, grid.decode(codes.t(), params).t(), rtol=0, atol=2e-6)
    assert ((values - span.t()).abs() <= (nearest - span.t()).abs() + 1e-3 * step.abs()).all()


@pytest.mark.parametrize("act_order", ["group", "full", *nightly("none")])
def test_linears_of_a_site_are_solved_as_if_alone(act_order):
    grid, other = AffineGrid(4, 128, symmetric=False), AffineGrid(3, 64, symmetric=False)
    weight, hessian, _ = settled(256, grid, act_order, rows=10)
    another, _, _ = problem(256, rows=4, seed=99)
    weights = [weight[:6], another, weight[6:7], weight[7:]]
    grids = [grid, other, grid, grid]
    for refined in (0, 2):
        solver = GptqSolver(act_order=act_order, refine=refined)
        together = solver.solve(weights, grids, hessian)
        assert [result.weight.grid for result in together] == grids
        for w, g, result in zip(weights, grids, together, strict=True):
            (alone,) = solver.solve([w], [g], hessian)
            assert result.rtn_error == pytest.approx(alone.rtn_error)
            if refined:  # a near tie may fall either way, as sums run in another order
                assert result.error == pytest.approx(alone.error, rel=0.02)
            else:
                assert torch.equal(result.weight.values(), alone.weight.values())


@pytest.mark.parametrize("in_features", [64, 200, 301])  # turned at once, and in parts about a middle row
def test_factorize(in_features):
    _, _, hessian = problem(in_features)
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(1))
    expected = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(in_features)
    expected = expected[order][:, order]
    untouched = hessian.clone()
    factor, damping, note = factorize(hessian, 0.01, order)
    assert note is None and torch.equal(hessian, untouched)
    torch.testing.assert_close(damped(hessian, order, damping), expected.float())
    assert torch.equal(factor, factor.triu()) and (factor.diagonal() > 0).all()
    assert (factor.double() @ factor.double().T - expected).norm() < 1e-6 * expected.norm()


def indefinite(share: float, in_features: int = 64) -> Tensor:
    """A Hessian whose smallest eigenvalue is `-share` times its mean diagonal."""
    _, _, hessian = problem(in_features)
    values, vectors = torch.linalg.eigh(hessian.double())
    values[0] = -share * values[1:].mean()
    return (vectors * values @ vectors.T).float()


def test_damping_grows_until_the_hessian_is_positive_definite():
    hessian = indefinite(0.05)
    expected = hessian.double() + 0.1 * hessian.diagonal().double().mean() * torch.eye(64)
    factor, damping, note = factorize(hessian, 0.001, torch.arange(64))
    assert note == "damping raised to 0.1"
    torch.testing.assert_close(damped(hessian, torch.arange(64), damping), expected.float())
    assert (factor.double() @ factor.double().T - expected).norm() < 1e-6 * expected.norm()

    weight, _, _ = problem(64)
    (solved,) = GptqSolver(damp=0.001).solve([weight], [AffineGrid(4, 32)], hessian)
    assert solved.notes == (note,)


def test_fewer_tokens_than_columns_need_no_more_than_the_usual_damping():
    weight, inputs, _ = problem(64)
    hessian = inputs[:5].T @ inputs[:5]  # rank 5
    (solved,) = GptqSolver().solve([weight], [AffineGrid(4, 32)], hessian)
    assert solved.fallback is None and solved.notes == ()
    assert solved.error < 0.1 * solved.rtn_error  # five directions are easily pleased


def test_hopeless_hessian_falls_back_to_rtn():
    weight, _, _ = problem(64)
    grid = AffineGrid(4, 32)
    hessian = indefinite(0.05) - 1e7 * torch.ones(64, 64) + 1e7 * torch.eye(64)
    (solved,) = GptqSolver().solve([weight], [grid], hessian)
    assert solved.fallback == "Hessian is not positive definite even with damping 1000"
    assert torch.equal(solved.weight.values(), rtn.quantize(weight, grid).values())
    assert solved.error == solved.rtn_error


@pytest.mark.parametrize("act_order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_dead_columns_are_rounded_to_nearest(act_order, symmetric):
    weight, inputs, _ = problem(96)
    dead = torch.tensor([0, 5, 41, 42, 95])
    inputs[:, dead] = 0
    grid = AffineGrid(4, 32, symmetric)
    solver = GptqSolver(act_order=act_order, refine=0)
    (solved,) = solver.solve([weight], [grid], 2 * inputs.T @ inputs / len(inputs))
    assert solved.fallback is None and solved.notes == ()
    group = solved.weight.group_of_columns()[dead]
    scale, zero = solved.weight.params.scale[:, group], solved.weight.params.zero[:, group]
    nearest = (torch.round(weight[:, dead] / scale) + zero).clamp(0, 15)
    assert torch.isfinite(solved.weight.values()).all()
    assert torch.equal(solved.weight.codes[:, dead].float(), nearest)


def test_site_that_no_token_reached_is_no_worse_than_rtn():
    weight, _, _ = problem(64)
    grid = AffineGrid(2, 32)
    (solved,) = GptqSolver().solve([weight], [grid], torch.zeros(64, 64))
    assert solved.fallback is None and solved.notes == ()
    baseline = rtn.quantize(weight, grid)
    assert (solved.weight.values() - weight).norm() <= (baseline.values() - weight).norm()


def test_linear_that_gptq_makes_worse_gets_rtn(monkeypatch):
    """Some codes of the second of three linears leave the sweep off by one; the others are kept."""
    weight, _, hessian = problem(64, rows=24)
    weights, grid = list(weight.split(8)), AffineGrid(4, 32, symmetric=False)
    solver = GptqSolver(act_order="none", refine=0)
    honest = gptq.sweep

    def garbled(*args):
        chosen = honest(*args)
        before = chosen.codes[::16, 8:16].clone()
        after = (before + 1).clamp(max=15)
        chosen.codes[::16, 8:16] = after
        step = torch.stack([part.scale for part in chosen.params]).repeat_interleave(2, 0)[:, 8:16]
        chosen.E[::16, 8:16] -= (after.float() - before) * step
        delta = chosen.E.t()
        damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
        chosen.lost = (delta @ damped * delta).sum(1)
        return chosen

    expected = solver.solve(weights, [grid] * 3, hessian)
    monkeypatch.setattr(gptq, "sweep", garbled)
    first, second, third = solver.solve(weights, [grid] * 3, hessian)

    assert torch.equal(second.weight.values(), rtn.quantize(weight[8:16], grid).values())
    assert second.error == second.rtn_error == expected[1].rtn_error
    told = re.fullmatch(r"gptq's error (\S+) is above round-to-nearest's (\S+)", second.fallback)
    garbled_error, rtn_error = map(float, told.groups())
    assert rtn_error == pytest.approx(second.rtn_error, rel=0.01)
    assert rtn_error < garbled_error < 2 * rtn_error  # a little worse is enough
    for kept, before in ((first, expected[0]), (third, expected[2])):
        assert kept.fallback is None
        assert torch.equal(kept.weight.values(), before.weight.values())


def test_rtn_solver_is_the_grid_group_by_group():
    weight, _, _ = problem(96)
    grid = AffineGrid(4, 32, symmetric=False)
    (solved,) = RtnSolver().solve([weight], [grid], None)
    groups = weight.view(-1, 32)
    params = grid.fit(groups)
    expected = grid.decode(grid.round(groups, params), params).view_as(weight)
    assert torch.equal(solved.weight.values(), expected)
    assert solved.error is None and solved.rtn_error is None and solved.fallback is None


def test_rows_that_are_one_group_need_no_further_copy_of_the_hessian():
    weight, _, hessian = problem(256)
    grid, order = AffineGrid(8, 256), torch.arange(256)
    A, damping, _ = factorize(hessian, 0.01, order)
    U, D = gptq.unit_upper(A)
    copy = damped(hessian, order, damping)
    with Made(hessian.numel()) as made:
        chosen = gptq.sweep(weight.T.contiguous(), U, D, grid)
        refine(weight.T.contiguous(), chosen, grid, copy, 2)
    assert len(made.seen) == 0


@pytest.mark.parametrize("type", ["Q2_K", "Q4_K", "Q6_K"])
def test_a_row_that_is_one_group_is_solved_as_one_of_two_that_do_not_depend_on_each_other(type):
    weight, _, hessian = problem(256, rows=32)
    solver = GptqSolver(act_order="none", refine=0)
    (one,) = solver.solve([weight], [ggml.named(type)], hessian)
    (two,) = solver.solve([weight.repeat(1, 2)], [ggml.named(type)], torch.block_diag(hessian, hessian))
    assert one.error == pytest.approx(two.error, rel=0.02)
