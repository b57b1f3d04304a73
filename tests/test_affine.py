"""quantkit.grids.affine against its formulas and against brute force."""

from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.grids import affine
from quantkit.grids.affine import AffineGrid, AffineParams
from quantkit.grids.grid import QuantizedWeight, flat, join, matrix, rows
from quantkit.grids.levels import HALF_MAX, HALF_MIN
from quantkit.quantize import methods

BITS = (2, 3, 4, 8)
GRIDS = [
    AffineGrid(bits, 32, symmetric, zero_min, signed=signed)
    for bits, (symmetric, zero_min, signed) in product(
        BITS, ((True, 0, False), (True, 0, True), (False, 0, False), (False, 1, False))
    )
]


def name(grid: AffineGrid) -> str:
    return f"{grid.bits}bit-" + (
        "signed" * grid.signed or "sym" if grid.symmetric else f"asym{grid.zero_min}"
    )


def groups(kind: str, rows: int = 64, size: int = 32, seed: int = 0) -> Tensor:
    """Weights `[rows, size]`."""
    generator = torch.Generator().manual_seed(seed)
    normal = 0.02 * torch.randn(rows, size, generator=generator)
    single = normal[:, :1] + 0.05 * normal[:, :1].sign()
    return {
        "normal": normal,
        "heavy": normal / torch.rand(rows, size, generator=generator).clamp(min=0.1),
        "positive": normal.abs() + 0.03,
        "negative": -normal.abs() - 0.03,
        "constant": single.expand(rows, size).contiguous(),
        "zero": torch.zeros(rows, size),
        "one weight": single * (torch.arange(size) == 3),
    }[kind]


KINDS = ("normal", "heavy", "positive", "negative", "constant", "zero", "one weight")


def importances(size: int, seed: int = 0) -> Tensor:
    return torch.exp(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def errors(grid: AffineGrid, weight: Tensor, importance: Tensor, params: AffineParams) -> Tensor:
    """Weighted squared error of each group, float64 `[rows]`."""
    delta = grid.decode(grid.round(weight, params), params).double() - weight
    return (importance.double() * delta.square()).sum(1)


def plain(grid: AffineGrid) -> AffineGrid:
    return AffineGrid(grid.bits, grid.group_size, grid.symmetric, grid.zero_min, search=False)


def full_range(grid: AffineGrid, weight: Tensor, params: AffineParams) -> AffineParams:
    """Parameters that cover the largest weight; with the searched sign, if scales have one."""
    if not grid.signed:
        return plain(grid).fit(weight)
    scale = (weight.abs().amax(1) / 2 ** (grid.bits - 1)).copysign(params.scale)
    return AffineParams(torch.where(scale == 0, 1, scale).half().float(), params.zero)


@pytest.mark.parametrize("bits", BITS)
def test_fit_without_search_covers_the_range(bits):
    """Element by element, in the words of the format: scale = range / steps, zero = where 0 lies."""
    steps = 2**bits - 1
    for kind, zero_min in product(("normal", "heavy", "positive", "negative"), (0, 1)):
        weight = groups(kind)
        symmetric = AffineGrid(bits, 32, True, zero_min, search=False).fit(weight)
        asymmetric = AffineGrid(bits, 32, False, zero_min, search=False).fit(weight)
        for row, values in enumerate(weight.tolist()):
            scale = torch.tensor(2 * max(map(abs, values)) / steps).half()
            assert symmetric.scale[row] == scale and symmetric.zero[row] == 2 ** (bits - 1)
            low, high = min(*values, 0.0), max(*values, 0.0)
            exact = (high - low) / steps
            assert asymmetric.scale[row] == torch.tensor(exact).half()
            assert asymmetric.zero[row] == min(max(round(-low / exact), zero_min), steps)


@pytest.mark.parametrize("grid", GRIDS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_what_is_stored_and_codes_are_the_nearest(grid, kind):
    weight = groups(kind)
    for fitted in (grid, plain(grid)):
        params = fitted.fit(weight, importances(32))
        assert params.scale.dtype == params.zero.dtype == torch.float32
        assert torch.equal(params.scale, params.scale.half().float())
        assert ((params.scale > 0) | (params.scale < 0) & fitted.signed).all()
        assert torch.equal(params.zero, params.zero.round())
        assert params.zero.min() >= grid.zero_min and params.zero.max() <= grid.max_code

        codes = grid.round(weight, params)
        assert codes.dtype == torch.uint8 and codes.max() <= grid.max_code
        table = torch.arange(grid.max_code + 1).expand(len(weight), -1)
        values = grid.decode(table, params)  # every value each group can take
        assert torch.equal(values, (table - params.zero[:, None]) * params.scale[:, None])
        nearest = (weight[:, :, None].double() - values[:, None, :]).abs().amin(2)
        reached = (weight.double() - grid.decode(codes, params)).abs()
        # a tie may fall to either side of float32's last digit
        assert (reached <= nearest + 1e-6 * params.scale.abs()[:, None]).all()

        assert torch.equal(grid.round(grid.decode(codes, params), params), codes)  # round trip


@pytest.mark.parametrize("grid", GRIDS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_search_is_never_worse_than_the_full_range(grid, kind):
    weight, importance = groups(kind), importances(32)
    params = grid.fit(weight, importance)
    searched = errors(grid, weight, importance, params)
    covering = errors(grid, weight, importance, full_range(grid, weight, params))
    size = (importance * weight.square()).sum(1)
    # float16's rounding of the scale, after the search, moves each value by 2^-11 of itself at most
    assert (searched.sqrt() <= covering.sqrt() + 2.0**-11 * size.sqrt()).all()
    if kind in ("normal", "heavy", "positive", "negative"):
        assert searched.sum() < 0.97 * covering.sum()
    if kind == "zero":
        assert searched.max() == 0
    if kind in ("constant", "one weight"):  # one value to hit: nothing but the scale's rounding is left
        assert (searched <= 2.0**-22 * size).all()


def brute_force(grid: AffineGrid, weight: Tensor, importance: Tensor) -> Tensor:
    """Least error of each group over 400 ranges, each with the best scale for its codes."""
    best = torch.full((len(weight),), torch.inf, dtype=torch.float64)
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    if grid.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    for share in torch.linspace(0.25, 1.1, 400).tolist():
        scale = share * (high - low) / grid.max_code
        zero = (-share * low / scale).round().clamp(grid.zero_min, grid.max_code)
        if grid.symmetric:
            zero = torch.full_like(scale, 2 ** (grid.bits - 1))
        for base in (scale, -scale) if grid.signed else (scale,):
            steps = (weight / base[:, None]).round().clamp(-zero[:, None], grid.max_code - zero[:, None])
            fitted = (importance * weight * steps).sum(1) / (importance * steps.square()).sum(1)
            params = AffineParams(fitted.half().float(), zero)
            best = torch.minimum(best, errors(grid, weight, importance, params))
    return best


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize(
    "bits, symmetric, signed", [(2, False, False), (3, True, False), (2, True, True), (3, True, True)]
)
def test_search_comes_close_to_brute_force(bits, symmetric, signed, kind, size):
    grid = AffineGrid(bits, size, symmetric, signed=signed)
    weight = groups(kind, rows=128, size=size)
    for importance in (torch.ones(size), importances(size)):
        searched = errors(grid, weight, importance, grid.fit(weight, importance))
        limit = 1.03 if bits == 2 else 1.02
        assert searched.sum() <= limit * brute_force(grid, weight, importance).sum()


@pytest.mark.parametrize("bits", [3, 4])
def test_search_does_not_hang_on_the_last_digit(bits):
    """Weights that differ by float32's rounding get the same scale, up to float16's own rounding."""
    grid = AffineGrid(bits, 16)
    weight = groups("normal", rows=512, size=16)
    one, other = grid.fit(weight).scale, grid.fit(weight.double()).scale
    assert (one / other - 1).abs().max() < 2.0**-9


@pytest.mark.parametrize("bits, share", [(2, 0.84), (3, 0.85), (4, 0.91)])
def test_a_negative_scale_gives_the_longer_side_to_the_weights_that_need_it(bits, share):
    """The levels reach from -2^(bits-1) to 2^(bits-1) - 1, mirrored by a negative scale."""
    weight, importance = groups("normal", rows=2000), importances(32)
    grid, unsigned = AffineGrid(bits, 32, signed=True), AffineGrid(bits, 32)
    params = grid.fit(weight, importance)
    relative = (weight / weight.abs().amax(1, keepdim=True)).double()
    terms = importance * relative.pow(2**bits + 1)
    lean, clear = terms.sum(1), terms.sum(1).abs() > 1e-5 * terms.abs().sum(1)
    assert torch.equal((params.scale < 0)[clear], (lean > 0)[clear])
    assert clear.double().mean() > 0.99 and 0.4 < (lean > 0).double().mean() < 0.6
    lost = [errors(g, weight, importance, g.fit(weight, importance)).sum() for g in (grid, unsigned)]
    assert lost[0] < share * lost[1]
    mirrored = grid.fit(-weight, importance)
    assert torch.equal(mirrored.scale, -params.scale)
    assert torch.equal(grid.round(-weight, mirrored), grid.round(weight, params))


@pytest.mark.parametrize(
    "method, options, signed",
    [
        ("gptq", {}, True),
        ("gptq", {"solver": "rtn"}, True),
        ("gptq", {"signed_scales": False}, False),
        ("gptq", {"layout": "compressed-tensors"}, True),
        ("gptq", {"layout": "compressed-tensors", "activations": "int8"}, False),
        ("gptq", {"layout": "compressed-tensors", "activations": "fp8"}, False),
        ("awq", {"sym": True}, True),
        ("awq", {"sym": True, "signed_scales": False}, False),
        ("w8a8", {}, False),
    ],
)
def test_kernels_that_read_scales_as_unsigned_get_none_below_zero(method, options, signed):
    made = methods.create(method, **options)
    weight = groups("normal", size=128)
    grid = made.grid(made.width(128), "model.layers.0.mlp.up_proj")
    for params in (grid.fit(weight), grid.fit(weight, importances(128))):
        assert bool((params.scale < 0).any()) == signed


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_importance_moves_the_error_to_where_it_is_cheap(bits):
    """A few outliers: worth covering when they matter, worth clipping when they do not."""
    grid = AffineGrid(bits, 32)
    weight = groups("normal")
    outliers = torch.arange(32) % 11 == 0
    weight[:, outliers] *= 6

    def squared(importance):
        delta = grid.decode(grid.round(weight, params := grid.fit(weight, importance)), params) - weight
        return delta[:, outliers].square().sum(), delta[:, ~outliers].square().sum()

    loud, quiet = squared(torch.where(outliers, 100.0, 1.0)), squared(torch.where(outliers, 0.01, 1.0))
    assert loud[0] < 0.5 * quiet[0]
    assert quiet[1] < 0.5 * loud[1]


def test_only_the_ratios_of_importance_count():
    grid, weight = AffineGrid(4, 32, symmetric=False), groups("heavy")
    even = grid.fit(weight, torch.full((32,), 4.0))
    assert torch.equal(even.scale, grid.fit(weight, torch.ones(32)).scale)
    assert not torch.equal(even.scale, grid.fit(weight, importances(32)).scale)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_without_importance_the_largest_weight_is_covered(bits, signed):
    """The weight furthest from zero is half a step away at most; on its other side, one step."""
    grid, weight = AffineGrid(bits, 32, signed=signed), groups("heavy")
    params = grid.fit(weight)
    assert torch.equal(params.scale, AffineGrid(bits, 32, signed=signed, search=False).fit(weight).scale)
    high, low = weight.amax(1), weight.amin(1)
    steps = 2**bits if signed else 2**bits - 1
    scale = 2 * torch.maximum(high, -low) / steps * torch.where(signed & (high > -low), -1, 1)
    assert torch.equal(params.scale, scale.half().float())
    missed = (grid.decode(grid.round(weight, params), params) - weight).abs()
    bound = (1.0 if signed else 0.5) * params.scale.abs()[:, None] + weight.abs() * 2.0**-10
    assert (missed <= bound).all()
    furthest = weight.abs() == weight.abs().amax(1, keepdim=True)
    assert (missed[furthest] <= (bound / 2 if signed else bound)[furthest]).all()


def test_fit_in_chunks_is_fit_at_once(monkeypatch):
    grid, weight = AffineGrid(4, 32, symmetric=False), groups("heavy")
    expected = grid.fit(weight, importances(32))
    monkeypatch.setattr("quantkit.grids.parallel.CACHEFUL", 6 * 32 * affine.TEMPORARIES)  # six rows at a time
    monkeypatch.setattr(affine, "SEARCH_SPAN", 2)
    params = grid.fit(weight, importances(32))
    assert torch.equal(params.scale, expected.scale) and torch.equal(params.zero, expected.zero)


@pytest.mark.parametrize("symmetric, search", list(product((True, False), (True, False))))
def test_scales_at_the_ends_of_float16_are_clamped_and_counted(symmetric, search):
    grid = AffineGrid(4, 32, symmetric, search=search)
    weight = groups("normal", rows=6)
    weight[1] *= 1e-9 / 0.02
    weight[2] = 0
    weight[4] *= 1e9
    params = grid.fit(weight)
    assert params.scale[1] == HALF_MIN == 2.0**-24
    assert params.scale[2] == 1 and params.scale[4] == HALF_MAX
    assert grid.clipped(params) == 2
    values = grid.decode(grid.round(weight, params), params)
    assert torch.equal(values[1:3], torch.zeros(2, 32)) and torch.isfinite(values).all()


def test_scaled_values_are_stored_values():
    grid = AffineGrid(4, 32, symmetric=False)
    params = grid.fit(groups("heavy"))
    factor = torch.linspace(0.5, 2, 64)
    scaled = grid.scaled(params, factor)
    assert torch.equal(scaled.scale, (params.scale * factor).half().float())
    assert torch.equal(scaled.zero, params.zero)


def test_matrices_are_joined_from_groups():
    grid = AffineGrid(4, 8, symmetric=False)
    weight = groups("heavy", rows=5, size=24)
    parts = [grid.fit(part) for part in weight.split(8, 1)]
    joined = join(parts)
    codes = torch.cat([grid.round(part, p) for part, p in zip(weight.split(8, 1), parts, strict=True)], 1)
    expected = torch.cat([grid.decode(c, p) for c, p in zip(codes.split(8, 1), parts, strict=True)], 1)
    shuffle = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    column_group = (torch.arange(24) // 8)[shuffle]
    assert joined.scale.shape == joined.zero.shape == (5, 3)
    assert torch.equal(QuantizedWeight(grid, codes, joined).values(), expected)
    scattered = QuantizedWeight(grid, codes[:, shuffle], joined, column_group)
    assert torch.equal(scattered.values(), expected[:, shuffle])
    part = QuantizedWeight(grid, codes[1:3], rows(joined, slice(1, 3)))
    assert torch.equal(part.values(), expected[1:3])
    for whole in (grid.fit_matrix(weight), matrix(flat(joined), 5)):
        assert torch.equal(whole.scale, joined.scale) and torch.equal(whole.zero, joined.zero)
