"""quantkit.grids.nf4 against bitsandbytes, and against a search through all 256 scales that can be stored."""

import pytest
import torch

from quantkit.grids import nf4
from quantkit.grids.grid import group
from quantkit.grids.levels import Absmax
from quantkit.grids.nf4 import NESTED_BLOCK, NestedParams, Nf4Grid
from quantkit.layouts.bitsandbytes import Nf4Layout
from quantkit.quantize.solvers import rtn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_weight(out_features: int, blocks: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Blocks of 64 whose sizes are spread over a decade, and two of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(out_features, blocks, 1, generator=generator))
    weight = sizes * torch.randn(out_features, blocks, 64, generator=generator) / 20
    weight[1, 0] = weight[-1, -1] = 0
    return weight.flatten(1).to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the high half."""
    return (codes.flatten()[::2] * 16 + codes.flatten()[1::2])[:, None]


def dequantized_by(bnb, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What bitsandbytes makes of the tensors of a checkpoint, in float32."""
    parts = {name.removeprefix("weight."): part.clone() for name, part in tensors.items() if name != "weight"}
    state = bnb.functional.QuantState.from_dict(parts, torch.device("cpu"))
    assert state.dtype == torch.float16
    state.dtype = torch.float32
    return bnb.functional.dequantize_4bit(tensors["weight"], state)


# ---- tables


def test_tables_are_those_of_bitsandbytes(bnb):
    assert torch.equal(torch.tensor(nf4.TABLE), bnb.functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(nf4.dynamic_map(), bnb.functional.create_dynamic_map())
    assert nf4.dynamic_map().unique().numel() == 256


# ---- one absmax a block


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_quantization_is_that_of_bitsandbytes(bnb, dtype):
    weight = random_weight(40, 5, dtype)
    theirs, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = rtn.quantize(weight.float(), Nf4Grid(double_quant=False))
    assert torch.equal(packed(ours.codes), theirs)
    assert torch.equal(ours.params.absmax.flatten(), state.absmax) and state.absmax[5] == 0
    assert ours.codes.unique().numel() == 16

    assert torch.equal(dequantized_by(bnb, Nf4Layout(double_quant=False).encode(ours)), ours.values())
    assert not ours.values()[1, :64].any()
    torch.testing.assert_close(ours.values().abs().view(40, 5, 64).amax(2), ours.params.absmax)


def test_codes_are_the_nearest_values():
    """Against a search through all 16; exactly halfway between two, either is right."""
    absmax = torch.tensor([0.5, 3.0, 1e-6])
    column = absmax[:, None] * torch.linspace(-1.2, 1.2, 64)
    codes = Nf4Grid().round(column, Absmax(absmax))
    distance = (column[..., None].double() - absmax[:, None, None].double() * torch.tensor(nf4.TABLE)).abs()
    chosen = distance.gather(2, codes.long()[..., None])[..., 0]
    assert (chosen <= distance.amin(2) * (1 + 1e-5)).all() and codes[0, 0] == 0 and codes[0, -1] == 15


@pytest.mark.parametrize("values", (nf4.TABLE, tuple(nf4.dynamic_map().tolist())))
def test_the_look_up_is_a_binary_search(values):
    """About every midpoint, the next float32 to either side of it, and anywhere, beyond the ends too."""
    ascending = torch.tensor(values)
    midpoints = (ascending[1:] + ascending[:-1]) / 2
    infinite = torch.tensor(torch.inf)
    beside = [torch.nextafter(midpoints, end) for end in (infinite, -infinite)]
    anywhere = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    small = anywhere * 10.0 ** torch.arange(-8, 2).repeat(1000)
    column = torch.cat([midpoints, *beside, small, torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-40])])
    for count in (len(column) // 4 * 4, len(column) // 4 * 4 - 1):
        found = nf4.nearest(column[:count], values)
        assert torch.equal(found.long(), torch.bucketize(column[:count], midpoints))


# ---- absmax in 8 bits


def nearest_absmax(absmax: torch.Tensor, params: NestedParams) -> torch.Tensor:
    """Of all 256 values that a block of 256 can store, the one nearest to each of `absmax`, one by one."""
    flat = zip(*(part.flatten().tolist() for part in (absmax, params.nested, params.offset)), strict=True)
    found = []
    for wanted, nested, offset in flat:
        storable = nf4.dynamic_map() * nested + offset
        found.append(storable[(storable.double() - wanted).abs().argmin()])
    return torch.stack(found).view(absmax.shape)


@pytest.mark.parametrize("turned", (False, True))  # the largest lies furthest from the mean, or the smallest
def test_every_double_quantized_absmax_is_the_nearest_that_can_be_stored(turned):
    """600 blocks: two full nested blocks, which begin within rows, and a third that is short."""
    absmax = Nf4Grid().fit(random_weight(120, 5).view(-1, 64)).absmax.view(120, 5)
    if turned:
        absmax = absmax.max() - absmax
    params = nf4.double_quantize(absmax)
    assert (params.offset == absmax.mean()).all()
    for start in range(0, 600, NESTED_BLOCK):
        block = slice(start, start + NESTED_BLOCK)
        largest = (absmax.flatten()[block] - absmax.mean()).abs().max()
        assert (params.nested.flatten()[block] == largest).all()
    wanted = nearest_absmax(absmax, params)
    torch.testing.assert_close((params.absmax - absmax).abs(), (wanted - absmax).abs(), rtol=1e-4, atol=1e-7)
    assert (params.absmax != absmax).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_double_quantization_loses_no_more_than_that_of_bitsandbytes(bnb, dtype):
    weight = random_weight(120, 5, dtype)
    theirs, state = bnb.functional.quantize_4bit(weight.clone(), quant_type="nf4", compress_statistics=True)
    state.dtype = torch.float32
    decoded = bnb.functional.dequantize_4bit(theirs, state)
    ours = rtn.quantize(weight.float(), Nf4Grid())
    torch.testing.assert_close(ours.params.offset[0, 0], state.offset)
    nested = ours.params.nested.flatten()[::NESTED_BLOCK]
    torch.testing.assert_close(nested, state.state2.absmax)

    assert torch.equal(dequantized_by(bnb, Nf4Layout().encode(ours)), ours.values())
    error, single = (
        (values - weight.float()).square().sum()
        for values in (ours.values(), rtn.quantize(weight.float(), Nf4Grid(False)).values())
    )
    assert error < (decoded - weight.float()).square().sum()
    assert error < 1.05 * single
    assert not ours.values()[1, :64].any() and not ours.values()[-1, -64:].any()


def test_weights_are_rounded_on_the_absmax_as_it_is_stored():
    weight = random_weight(120, 5)
    stored = rtn.quantize(weight, Nf4Grid())
    absmax = stored.params.absmax.repeat_interleave(64, 1)
    options = absmax[..., None] * torch.tensor(nf4.TABLE)
    error = (options - weight[..., None]).abs().amin(2)
    assert (absmax > 0).all()
    torch.testing.assert_close((stored.values() - weight).abs(), error, rtol=1e-4, atol=1e-7)
    naive = rtn.quantize(weight, Nf4Grid(False)).codes
    assert (stored.codes != naive).float().mean() > 1e-3


def test_scaled_stores_the_nearest_to_the_scaled_absmax():
    weight = random_weight(60, 5)
    factor = 1 + 0.2 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    whole = Nf4Grid().fit_matrix(weight)
    for index in (0, 3):
        before = group(whole, index)
        after = Nf4Grid().scaled(before, factor)
        assert torch.equal(after.nested, before.nested) and torch.equal(after.offset, before.offset)
        wanted = before.absmax * factor
        nearest = nearest_absmax(wanted, before)
        torch.testing.assert_close(
            (after.absmax - wanted).abs(), (nearest - wanted).abs(), rtol=1e-4, atol=1e-7
        )
        assert (after.code != before.code).float().mean() > 0.5
    single = group(Nf4Grid(False).fit_matrix(weight), 2)
    assert torch.equal(Nf4Grid(False).scaled(single, factor).absmax, single.absmax * factor)


@pytest.mark.parametrize("weight", [torch.zeros(3, 128), torch.full((3, 128), -0.25)])
def test_blocks_that_are_all_alike_are_exact(bnb, weight):
    """Nothing is left of absmax without its mean: the nested scale is zero."""
    ours = rtn.quantize(weight, Nf4Grid())
    assert not ours.params.nested.any()
    assert torch.equal(ours.values(), weight)
    assert torch.equal(dequantized_by(bnb, Nf4Layout().encode(ours)), weight)


def test_a_block_too_small_for_its_nested_scale_is_lost_not_turned_over():
    """Beside a block a thousand times larger, what is stored for small absmax may be below zero."""
    weight = torch.linspace(-1, 1, 64).repeat(16, 1) * torch.logspace(-3, -1, 16)[:, None]
    weight[10] *= 200
    ours = rtn.quantize(weight, Nf4Grid())
    below = ours.params.absmax[:, 0] <= 0
    assert below.any() and not ours.values()[below].any()
    assert ((ours.values() - weight).norm(dim=1) <= weight.norm(dim=1)).all()
