"""quantkit.grids.int8 against bitsandbytes and exact integers."""

import itertools

import pytest
import torch
from sums import assert_sums

from quantkit.grids import int8
from quantkit.grids.int8 import HALF_MAX, Int8Grid, Int8Linear
from quantkit.grids.levels import Absmax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IN, OUT, TOKENS = 96, 40, 12
pytestmark = pytest.mark.processor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_bitsandbytes(bnb, dtype):
    weight = randn(48, 640, dtype=dtype) * torch.logspace(-4, 2, 48)[:, None].to(dtype)
    weight[5] = 0
    codes, absmax, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    params = Int8Grid(640).fit(weight.float())
    ours = Int8Grid(640).round(weight.float(), params)
    assert torch.equal(params.absmax, absmax) and absmax[5] == 0
    assert torch.equal(ours.short() - 128, codes.short())
    assert codes.abs().amax(1)[6:].eq(127).all()  # the test's own: rows use the whole range

    values = Int8Grid(640).decode(ours, params)
    torch.testing.assert_close(values, codes * absmax[:, None] / 127, rtol=2e-7, atol=0)
    step, low = Int8Grid(640).steps(params)
    levels = torch.empty(48, 640)
    Int8Grid(640).snap((weight.half().float() + low.t()) / step.t(), levels)
    apart = (levels - Int8Grid(640).levels(ours)).abs()  # next to a midpoint either may be
    assert apart.max() <= 1 and apart.mean() < 1e-3


def test_weights_beyond_float16_are_cut_off_and_reported():
    weight = torch.tensor([[1e5, -3e4, 0.0], [1.0, -2.0, 0.5]])
    grid = Int8Grid(3)
    params = grid.fit_matrix(weight)
    assert params.absmax.tolist() == [[HALF_MAX], [2.0]] and grid.clipped(params) == 1
    assert grid.clipped(grid.fit_matrix(torch.tensor([[1e-7, 0.0, 0.0], [0.0, 0.0, 0.0]]))) == 1
    flat = Absmax(params.absmax[:, 0])
    assert (grid.round(weight, flat).int() - 128).tolist() == [[127, -58, 0], [64, -127, 32]]
    assert grid.scaled(flat, torch.tensor([0.5, 3.0])).absmax.tolist() == [HALF_MAX / 2, 6.0]


# ---- activations


def stored(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 `[out, in]` and absmax `[out]` as a checkpoint holds them."""
    grid = Int8Grid(weight.shape[1])
    params = grid.fit(weight.float())
    return (grid.round(weight.float(), params).short() - 128).to(torch.int8), params.absmax


def inputs(outliers: bool, dtype: torch.dtype, sequences: int = 1) -> torch.Tensor:
    """Activations below 5; with outliers, some that reach 6, in columns of each sequence's own."""
    x = (1.2 * randn(sequences, TOKENS, IN, seed=3)).clamp(-5, 5)
    if outliers:
        for k in range(sequences):
            x[k, k % TOKENS, [7, 30 + k]] = torch.tensor([-60.0, 6.0])
            x[k, (k + 4) % TOKENS, 7] = 21.5
            x[k, (k + 2) % TOKENS, 7] = 5.9  # below the threshold, and its row's largest value
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", (6.0, 0.0))
@pytest.mark.parametrize("outliers", (True, False))
@pytest.mark.parametrize("bias", (True, False))
def test_the_product_is_that_of_bitsandbytes_bit_by_bit(bnb, monkeypatch, dtype, threshold, outliers, bias):
    weight, shift = randn(OUT, IN, seed=1, dtype=dtype) / 8, randn(OUT, seed=2, dtype=dtype) if bias else None
    layer = bnb.nn.Linear8bitLt(IN, OUT, bias, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict({"weight": weight} | ({"bias": shift} if bias else {}), assign=False)
    layer = layer.to("cpu").eval()
    if bias:
        layer.bias.data = shift
    x = inputs(outliers, dtype)
    with torch.no_grad(), monkeypatch.context() as exact:  # limited to AVX512_CORE its sums saturate
        exact.setattr(torch, "_int_mm", lambda a, b: (a.long() @ b.long()).int())
        theirs = layer(x)
    codes, absmax = stored(weight)
    assert torch.equal(layer.state.CB, codes)
    ours = Int8Linear(codes, absmax, shift, threshold)(x)
    assert_sums(ours, theirs, max(1e-6, torch.finfo(dtype).eps) if outliers and threshold else 0)


def test_outliers_are_decided_sequence_by_sequence():
    """Column 7 is an outlier of three sequences, columns 30, 31, 32 of one each; the last has none."""
    codes, absmax = stored(randn(OUT, IN, seed=1))
    batch = torch.cat([inputs(True, torch.float32, 3), inputs(False, torch.float32)])
    marked = int8.outlier_columns(batch, 6.0)
    assert [row.nonzero()[:, 0].tolist() for row in marked] == [[7, 30], [7, 31], [7, 32], []]
    linear = Int8Linear(codes, absmax, None, 6.0)
    together = linear(batch)
    alone = torch.cat([linear(sequence[None]) for sequence in batch])
    assert_sums(together, alone)
    merged = linear(batch.flatten(0, 1)[None]).view_as(together)
    assert not torch.equal(together, merged)  # as one sequence it is another computation


def test_a_row_of_zeros_stays_zero():
    codes, absmax = stored(randn(OUT, IN, seed=1))
    x = inputs(True, torch.float32)
    x[0, 5] = 0
    result = Int8Linear(codes, absmax, None, 6.0)(x)
    assert not result[0, 5].any() and result.isfinite().all() and result[0, 4].any()


# ---- integer products


MULTIPLY = pytest.mark.parametrize("multiply", (int8._pieces_matmul, int8._int_matmul))


@pytest.fixture
def poisoned():
    """Memory that nobody wrote holds the largest number of its type."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
    yield
    torch.use_deterministic_algorithms(False)


def check(multiply, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sums = multiply(a, b)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.long(), a.long() @ b.long().t()), (a.shape, a.stride(), b.shape, b.stride())
    return sums


@pytest.mark.parametrize("k", (1, int8.EXACT, int8.EXACT + 1, 2 * int8.EXACT + 1, 4 * int8.EXACT - 1))
@MULTIPLY
def test_sums_of_int8_products_are_exact(poisoned, multiply, k):
    """At the extreme codes sums pass 2^24, beyond which float32 cannot tell odd numbers apart."""
    generator = torch.Generator().manual_seed(k)
    a = torch.full((3, k), 127, dtype=torch.int8)
    b = torch.full((5, k), 127, dtype=torch.int8)
    b[1] = -127
    a[2] = torch.randint(-127, 128, (k,), generator=generator)
    b[2:] = torch.randint(-127, 128, (3, k), generator=generator)
    assert check(multiply, a, b)[0, 0] == 127 * 127 * k


@MULTIPLY
def test_sums_of_any_shape_are_exact(poisoned, multiply):
    """Kernels have edges of their own; oneDNN without VNNI adds 255 * 127 twice in 16 bit, for 127."""
    small, deep = (1, 2, 3, 8, 16, 17, 33), (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 130)
    for n, m, k in itertools.product((0, *small), (0, *small), deep):
        a, b = (torch.full((rows, k), 127, dtype=torch.int8) for rows in (n, m))
        b[::2] = -127
        check(multiply, a, b)


@MULTIPLY
def test_sums_do_not_depend_on_strides(poisoned, multiply):
    """The stride of a dimension of one may be anything: that of the only token, of the only output."""
    whole = torch.randint(-127, 128, (8, 128), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    ways = [
        *(whole[3:4, :64].as_strided((1, 64), (stride, 1)) for stride in (0, 1, 64, 128, 999)),
        *(whole[:, :64], whole[:, ::2], whole[::2, 64:], whole.view(64, 16).t(), whole.view(16, 64)[::5]),
        whole[:1].expand(4, -1)[:, :64],
    ]
    for a, b in itertools.product(ways, ways):
        check(multiply, a, b)
