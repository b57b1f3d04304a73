"""4-bit floats against their specification to the letter: values, scales, search, error feedback, bytes."""

import itertools
from dataclasses import replace

import ggml_library
import pytest
import torch

from quantkit.grids.fp4 import Fp4Params, MxFp4Grid, NvFp4Grid, divisor_of
from quantkit.grids.ggml import named
from quantkit.grids.grid import Grid, QuantizedWeight, flat
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.ggml.blocks import pack, unpack
from quantkit.quantize.solvers import rtn
from quantkit.quantize.solvers.gptq import GptqSolver


def e2m1(code: int) -> float:
    """OCP Microscaling Formats 1.0, section 5.3.3: a sign, two bits of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2))


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, section 5.1: four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = [e2m1(code) for code in range(16)]
SCALES = {"nvfp4": [e4m3(byte) for byte in range(1, 127)], "mxfp4": [2.0**e for e in range(-126, 128)]}
GRIDS = {"nvfp4": NvFp4Grid(divisor=64.0), "mxfp4": MxFp4Grid()}
named_grids = pytest.mark.parametrize("name", GRIDS)


def weights(rows: int = 24, width: int = 64, seed: int = 0) -> torch.Tensor:
    """Rows of many sizes; one of zeros, one with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, width, generator=generator) * torch.logspace(-2, 0.5, rows)[:, None]
    found[1], found[2, 5] = 0, 20
    return found


def nearest(weight: float, scale: float) -> float:
    """Of all sixteen values times a scale; of equals the larger one."""
    return min((scale * value for value in VALUES), key=lambda value: (abs(value - weight), -abs(value)))


@named_grids
def test_codes_are_the_nearest_values(name):
    grid, step = GRIDS[name], torch.tensor([0.25, 2.0])
    params = Fp4Params(step, torch.ones(2))
    weight = torch.linspace(-14, 14, 1121).repeat(2, 1)[:, : 1120 // grid.group_size * grid.group_size]
    codes = grid.round(weight, params)
    for row, scale in enumerate(step.tolist()):
        wanted = [nearest(value, scale) for value in weight[row].tolist()]
        assert grid.decode(codes, params)[row].tolist() == wanted
    every = torch.arange(16, dtype=torch.uint8).expand(2, 16)
    assert grid.decode(every, params)[1].tolist() == [2 * value for value in VALUES]
    assert grid.round(grid.decode(every, params), params)[0].tolist() == [0, *range(1, 8), 0, *range(9, 16)]


@named_grids
@pytest.mark.parametrize("weighed", (False, True))
def test_the_search_finds_the_best_of_all_scales(name, weighed):
    """Against every scale there is, one after another, in float64."""
    grid = GRIDS[name]
    weight = weights(width=grid.group_size)
    importance = torch.rand(grid.group_size, generator=torch.Generator().manual_seed(1)) if weighed else None
    found = grid.fit(weight, importance)
    costs = torch.ones(grid.group_size) if importance is None else importance
    table = torch.tensor(VALUES, dtype=torch.float64)

    def lost(row: torch.Tensor, step: float) -> float:
        missed = (row.double()[:, None] - step * table).abs().amin(1)
        return float((missed.square() * costs).sum())

    divisor = float(found.divisor[0])
    for row, scale in zip(weight, found.scale.tolist(), strict=True):
        assert scale in SCALES[name]
        best = min(lost(row, other / divisor) for other in SCALES[name])
        if row.any():
            assert lost(row, scale / divisor) <= best * (1.02 if weighed else 1 + 1e-6) + 1e-12


def test_without_a_search_the_largest_weight_fits():
    weight = weights(width=16)
    plain = NvFp4Grid(divisor=64.0).plain().fit(weight)
    wanted = [min(SCALES["nvfp4"], key=lambda s: abs(s - 64 * w / 6)) for w in weight.abs().amax(1).tolist()]
    assert plain.scale.tolist() == wanted
    weight = weights(width=32)
    plain = MxFp4Grid().plain().fit(weight).scale  # the specification, section 6.3
    for scale, largest in zip(plain.tolist(), weight.abs().amax(1).tolist(), strict=True):
        assert 4 * scale <= largest < 8 * scale or largest == 0


def test_four_over_six():
    """A group of 4s and 3s is exact with its largest weight at 4; with it at 6 or cut off it is not."""
    weight = torch.tensor([[4.0, -3.0, 2.0, 1.5, 1.0, 0.5, -4.0, 3.0] * 2])
    for scale in (1.0, 1.25, 0.875):
        params = NvFp4Grid(divisor=64.0).fit(weight * scale)
        assert (params.scale / params.divisor).tolist() == [scale]


def test_a_divisor_is_a_power_of_two_that_leaves_room():
    for largest in (1e-3, 0.0731, 1.0, 5.99, 6.0, 1e4, 240 * 6.0):
        divisor = divisor_of(largest)
        assert torch.frexp(torch.tensor(divisor)).mantissa == 0.5
        assert 120 < largest / 6 * divisor <= 240
    assert divisor_of(0.0) == 1.0
    many = [torch.full((2, 16), 0.5), torch.full((4, 16), -3.0)]
    assert NvFp4Grid().together(many).divisor == divisor_of(3.0)
    assert NvFp4Grid(divisor=8.0).together(many).divisor == 8.0
    params = NvFp4Grid().fit_matrix(weights())
    assert params.divisor.unique().tolist() == [divisor_of(20.0)]


@named_grids
def test_decoded_weights_are_bfloat16(name):
    weight = rtn.quantize(weights(), GRIDS[name]).values()
    assert torch.equal(weight.bfloat16().float(), weight) and weight.any()


@named_grids
def test_scaling_takes_the_nearest_scale(name):
    grid = GRIDS[name]
    scales = torch.tensor(SCALES[name])
    scales = scales[(scales > 0.1) & (scales < 100)]
    factors = torch.linspace(0.6, 1.7, 12)
    for scale, factor in itertools.product(scales[:: len(scales) // 7].tolist(), factors.tolist()):
        params = grid.scaled(Fp4Params(torch.tensor([scale]), torch.ones(1)), torch.tensor([factor]))
        distance = abs(params.scale.item() - scale * factor)
        assert distance <= min(abs(other - scale * factor) for other in SCALES[name]) + 1e-6 * scale


def feedback(weight: torch.Tensor, hessian: torch.Tensor, grid: NvFp4Grid | MxFp4Grid) -> torch.Tensor:
    """GPTQ's equations 2 and 3 in float64, a column at a time, every value looked up among sixteen."""
    weight, hessian = weight.double().clone(), hessian.double()
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse, eliminated, pivots = torch.linalg.inv(hessian), [], []
    left = inverse.clone()
    for q in range(len(inverse)):
        eliminated.append(left.clone())
        pivots.append(1 / left[q, q])
        left = left - torch.outer(left[:, q], left[q]) / left[q, q]
    values = torch.zeros_like(weight)
    for q in range(len(inverse)):
        if q % grid.group_size == 0:
            group = slice(q, q + grid.group_size)
            step = grid.fit(weight[:, group].float(), torch.stack(pivots[group]).float()).step.tolist()
        chosen = [nearest(w, s) for w, s in zip(weight[:, q].tolist(), step, strict=True)]
        values[:, q] = torch.tensor(chosen)
        row = eliminated[q][q]
        weight[:, q + 1 :] -= torch.outer((weight[:, q] - values[:, q]) / row[q], row[q + 1 :])
    return values.float()


def problem(width: int = 64, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mix = torch.eye(width) + torch.randn(width, width, generator=generator) * 1.5 / width**0.5
    inputs = torch.randn(4 * width, width, generator=generator) @ mix
    return torch.randn(rows, width, generator=generator), 2 * inputs.T @ inputs / len(inputs)


@named_grids
def test_the_sweep_is_gptq(name):
    weight, hessian = problem()
    (found,) = GptqSolver(refine=0, act_order="none").solve([weight], [GRIDS[name]], hessian)
    assert torch.equal(found.weight.values(), feedback(weight, hessian, GRIDS[name]))


@named_grids
def test_feedback_halves_the_loss_of_rounding_and_of_the_plain_grid(name):
    weight, hessian = problem(128, 32)
    errors = []
    for grid in (GRIDS[name], GRIDS[name].plain()):
        (found,) = GptqSolver().solve([weight], [grid], hessian)
        assert found.fallback is None
        errors += [found.error, found.rtn_error]
    searched, rounded, plain, plain_rounded = errors
    assert searched < 0.5 * rounded and rounded < plain_rounded and searched < plain


# ---- as ggml has them


needs_ggml = pytest.mark.skipif(ggml_library.library() is None, reason="xllamacpp is not installed")


def blocks(name: str, divisor: float = 1.0):
    return replace(named(name), divisor=divisor) if name == "NVFP4" else named(name)


@needs_ggml
@pytest.mark.parametrize("name", ("MXFP4", "NVFP4"))
def test_bytes_equal_ggmls_encoder(name):
    rows = [weights(12, 512), weights(12, 512, 1).bfloat16().float()]
    halves = torch.arange(512).sub(256).div(16).expand(2, 512)
    weight = torch.cat([*rows, halves, weights(4, 512, 2) * 1e-3])
    wanted = ggml_library.encode(name, weight)
    grid = blocks(name)
    assert torch.equal(pack(grid, *grid.quantize(weight)), wanted)
    scaled = blocks(name, 16.0)
    wanted = ggml_library.encode(name, 16 * weight if name == "NVFP4" else weight)
    assert torch.equal(pack(scaled, *scaled.quantize(weight)), wanted)


@needs_ggml
@pytest.mark.parametrize("name", ("MXFP4", "NVFP4"))
def test_every_scale_and_code_decodes_as_ggml_does(name):
    size = 17 if name == "MXFP4" else 36
    encoded = torch.randint(0, 256, (508, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    if name == "MXFP4":
        encoded[:254, 0] = torch.arange(1, 255)
        encoded[254:, 0] = torch.arange(1, 255)
    else:
        encoded[:, :4] = torch.arange(508)[:, None].add(torch.arange(4)).remainder(127).to(torch.uint8)
    grid = blocks(name)
    codes, params = unpack(grid, encoded)
    values = grid.decode(codes.view(-1, grid.group_size), flat(params))
    assert torch.equal(values, ggml_library.decode(name, encoded, grid.group_size))
    assert torch.equal(pack(grid, codes, params), encoded)


@pytest.mark.parametrize("name", ("MXFP4", "NVFP4"))
def test_a_blocks_weight_is_the_grids_and_comes_back(name):
    """The same scales and values as on the grid without blocks; the divisor lies beside the bytes."""
    weight, plain = weights(), {"MXFP4": MxFp4Grid(), "NVFP4": NvFp4Grid()}[name]
    grid, wanted = named(name).together([weight]), rtn.quantize(weight, plain)
    params = Grid.fit_matrix(grid, weight)  # by the search, not as ggml encodes
    codes = grid.round(weight.reshape(-1, grid.group_size), flat(params)).view(weight.shape)
    stored = QuantizedWeight(grid, codes, params)
    missed = [(found.values() - weight).double().square().sum().item() for found in (stored, wanted)]
    assert missed[0] == pytest.approx(missed[1], rel=1e-6)
    tensors = GgmlLayout().encode(stored)
    assert ("ggml_scale" in tensors) == (name == "NVFP4")
    again = GgmlLayout().decode(tensors)
    assert torch.equal(again.values(), stored.values())
