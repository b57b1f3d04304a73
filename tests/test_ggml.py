"""ggml's block types: bytes against ggml's own encoder and decoder, rounding against every value there is."""

from dataclasses import replace
from types import SimpleNamespace

import ggml_library
import pytest
import torch
from safetensors import safe_open

from quantkit.errors import QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.grids.ggml import TYPES, kquants, named
from quantkit.grids.ggml.search import extreme, total
from quantkit.grids.grid import QuantizedWeight, group
from quantkit.layouts.ggml import GgmlLayout
from quantkit.layouts.ggml.blocks import decode_rows, encode_rows, pack, row_bytes, unpack, vanished

PLAIN = ("F32", "F16", "BF16")
SCALAR = tuple(name for name in TYPES if not name.startswith(("IQ2", "IQ3", "TQ", "MXFP4", "NVFP4")))
WIDTH = 512
needs_ggml = pytest.mark.skipif(ggml_library.library() is None, reason="xllamacpp is not installed")


def weights() -> torch.Tensor:
    """Rows of every kind that an encoder treats in its own way, float32 `[rows, WIDTH]`."""
    torch.manual_seed(0)
    normal = torch.randn(8, WIDTH) * 0.02
    heavy = torch.distributions.StudentT(1.5).sample((8, WIDTH)) * 0.01
    outliers = normal.clone()
    outliers[:, 5] *= 1000
    outliers[torch.rand(8, WIDTH) < 0.01] *= 100
    sparse = normal * (torch.rand(8, WIDTH) < 0.5)
    sparse[0, :300], sparse[1, 32:64], sparse[2, :16], sparse[3, 256:] = 0, 0, 0, 1e-20
    sparse[4, :256] = -0.0
    sparse[5:8] = torch.where(torch.rand(3, WIDTH) < 0.5, sparse[5:8].abs(), -0.0)
    sparse[7] *= 0.0
    signs = torch.stack([normal[0].abs(), -normal[1].abs(), torch.where(normal[2] > 0, 0.5, -0.5)])
    constant = torch.tensor([0.37, -0.37, 0.0, -0.0])[:, None].expand(4, WIDTH)
    powers = torch.tensor([-5, -7, -8, -9, -12, -16, -20, -30, -36, -38, -40, -44, 3])
    tiny = torch.randn(len(powers), WIDTH, dtype=torch.float64) * 10.0 ** powers[:, None]
    uneven = torch.randn(8, WIDTH) * (10.0 ** (torch.rand(8, WIDTH // 16) * 8 - 8)).repeat_interleave(16, 1)
    integers = torch.randint(-3, 4, (4, WIDTH)).float()
    rows = normal, normal.bfloat16().float(), heavy, outliers, sparse, signs, constant, tiny.float(), uneven
    return torch.cat([*rows, integers])


def importances() -> dict[str, torch.Tensor | None]:
    """What may come out of an importance matrix, `[WIDTH]`."""
    torch.manual_seed(1)
    zeros = torch.rand(WIDTH) * (torch.rand(WIDTH) < 0.7)
    zeros[:64] = 0
    wide = 10.0 ** (torch.rand(WIDTH) * 8 - 4)
    return {"none": None, "wide": wide, "zeros": zeros, "all zero": torch.zeros(WIDTH)}


@needs_ggml
@pytest.mark.parametrize("name", (*SCALAR, *PLAIN))
@pytest.mark.parametrize("costs", importances())
def test_bytes_equal_ggmls_encoder(name, costs):
    weight, importance = weights(), importances()[costs]
    wanted = ggml_library.encode(name, weight, importance)
    encoded = encode_rows(name, weight, importance)
    differing = (encoded != wanted).any(1).nonzero()[:, 0].tolist()
    assert differing == []
    assert encoded.shape == (len(weight), row_bytes(name, WIDTH))


@needs_ggml
@pytest.mark.parametrize("name", SCALAR)
def test_bytes_equal_ggmls_encoder_on_real_weights(name, demo_model):
    weight = model_weight(demo_model, "model.layers.2.mlp.gate_proj.weight")[:128]
    torch.manual_seed(2)
    for importance in (None, torch.rand(weight.shape[1]) ** 4):
        wanted = ggml_library.encode(name, weight, importance)
        assert torch.equal(encode_rows(name, weight, importance), wanted)


@needs_ggml
@pytest.mark.parametrize("name", SCALAR)
def test_a_matrix_of_many_chunks_has_the_bytes_of_its_rows(name, monkeypatch):
    monkeypatch.setattr("quantkit.grids.parallel.CACHEFUL", 3 * WIDTH)
    weight, importance = weights()[::8], importances()["wide"]
    grid = named(name)
    for costs in (None, importance):
        wanted = ggml_library.encode(name, weight, costs)
        assert torch.equal(encode_rows(name, weight, costs), wanted)
        assert torch.equal(pack(grid, *grid.quantize(weight, costs)), wanted)


def model_weight(folder, name: str) -> torch.Tensor:
    """A weight of the demo model, columns that fill no super-block left out."""
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        weight = tensors.get_tensor(name).float()
    return weight[:, : weight.shape[1] // 256 * 256].contiguous()


@pytest.mark.parametrize("name", ("Q4_K", "Q6_K", "Q4_0"))
def test_threads_share_the_chunks_and_change_nothing(name, monkeypatch):
    monkeypatch.setattr("quantkit.grids.parallel.CACHEFUL", 3 * WIDTH)
    weight = weights()[::6]
    alone = encode_rows(name, weight)
    values = decode_rows(name, alone, WIDTH)
    torch.set_num_threads(2)
    try:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                assert torch.equal(encode_rows(name, weight), alone)
                assert torch.equal(decode_rows(name, alone, WIDTH), values)
                codes, params = named(name).quantize(torch.nn.Parameter(weight))
                assert torch.equal(pack(named(name), codes, params), alone)
        with pytest.raises(QuantkitError, match="type I8 are not supported"):
            decode_rows("I8", torch.zeros(40, WIDTH, dtype=torch.uint8), WIDTH)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def blobs(name: str) -> torch.Tensor:
    """Random blocks: every byte pattern that leaves the float16 numbers finite."""
    torch.manual_seed(3)
    grid = named(name)
    encoded = torch.randint(0, 256, (64, row_bytes(name, WIDTH)), dtype=torch.uint8)
    codes, params = unpack(grid, encoded)
    for part in ("d", "dmin", "m"):
        if getattr(params, part, None) is not None:
            getattr(params, part).copy_((torch.randn(getattr(params, part).shape) * 0.01).half().float())
    return pack(grid, codes, params)


@needs_ggml
@pytest.mark.parametrize("name", TYPES)
def test_decoding_is_ggmls_to_the_bit(name):
    encoded = blobs(name)
    wanted = ggml_library.decode(name, encoded, WIDTH).view(torch.int32)
    assert torch.equal(decode_rows(name, encoded, WIDTH).view(torch.int32), wanted)
    values = QuantizedWeight(named(name), *unpack(named(name), encoded)).values()
    assert torch.equal(values.view(torch.int32), wanted)


@needs_ggml
def test_every_scale_byte_of_nvfp4_has_one_value():
    """0xFF is NaN in e4m3 with a sign; ggml reads 480, the whole scale of 240 halves."""
    encoded = torch.zeros(64, 36, dtype=torch.uint8)
    encoded[:, :4] = torch.arange(256, dtype=torch.uint8).view(64, 4)
    encoded[:, 4:] = torch.arange(32, dtype=torch.uint8) * 7
    wanted = ggml_library.decode("NVFP4", encoded, 64)
    codes, params = unpack(named("NVFP4"), encoded)
    assert torch.equal(decode_rows("NVFP4", encoded, 64), wanted)
    assert torch.equal(QuantizedWeight(named("NVFP4"), codes, params).values(), wanted)
    assert params.scales.flatten()[[0x7E, 0x7F, 0xFE, 0xFF]].tolist() == [448, 0, 448, 480]
    assert torch.equal(decode_rows("NVFP4", pack(named("NVFP4"), codes, params), 64), wanted)


def test_weights_below_the_smallest_scale_of_mxfp4_are_no_large_ones():
    weight = torch.linspace(-1, 1, 32) * torch.tensor([2.0**-149, 2.0**-130, 2.0**-126, 2.0**-125])[:, None]
    encoded = encode_rows("MXFP4", weight)
    assert encoded[:, 0].tolist() == [0, 0, 0, 0]
    values = decode_rows("MXFP4", encoded, 32)
    assert torch.equal(values[0], torch.zeros(32)) and values.abs().max() == 2.0**-125
    assert ((values - weight).abs() <= 2.0**-126).all()


def test_weights_out_of_range_are_counted_or_refused():
    weight = torch.full((4, WIDTH), 0.02)
    weight[1] = 2.0**-40
    weight[2, :7] = 2.0**-26
    weight[3] = 0
    lost = {"F16": WIDTH + 7, "BF16": 0, "Q8_0": WIDTH, "Q6_K": WIDTH, "MXFP4": 0, "NVFP4": WIDTH}
    for name, wanted in lost.items():
        assert vanished(name, weight, encode_rows(name, weight)) == wanted, name
    weight[0, 3] = 1e7
    for name in ("F16", "Q8_0"):
        with pytest.raises(QuantkitError, match=f"up to 1e[+]07 are too large for {name}"):
            vanished(name, weight, encode_rows(name, weight))
    assert vanished("BF16", weight, encode_rows("BF16", weight)) == 0


@needs_ggml
@pytest.mark.parametrize("name", ("F16", "BF16"))
def test_plain_types_decode_to_the_bit(name):
    encoded = encode_rows(name, weights())
    assert torch.equal(decode_rows(name, encoded, WIDTH), ggml_library.decode(name, encoded, WIDTH))


@pytest.mark.parametrize("name", TYPES)
def test_layout_encodes_and_decodes_exactly(name):
    grid = named(name)
    weight = QuantizedWeight(grid, *grid.quantize(weights()[:16]))
    tensors = GgmlLayout().encode(weight)
    assert tensors["ggml"].shape == (16, row_bytes(name, WIDTH))
    decoded = GgmlLayout().decode(tensors)
    assert decoded.grid == grid
    assert torch.equal(decoded.codes, weight.codes)
    for field, part in vars(weight.params).items():
        assert part is None or torch.equal(getattr(decoded.params, field), part)
    assert torch.equal(GgmlLayout().encode(decoded)["ggml"], tensors["ggml"])


@pytest.mark.parametrize("name", SCALAR)
def test_rounding_finds_the_nearest_of_all_values(name):
    grid = named(name)
    _, params = unpack(grid, blobs(name))
    params = group(params, 1)
    torch.manual_seed(4)
    weight = torch.randn(64, grid.group_size) * grid.decode(
        torch.randint(0, 2**grid.bits, (64, grid.group_size), dtype=torch.uint8), params
    )
    codes = grid.round(weight, params)
    every = torch.stack(
        [
            grid.decode(torch.full_like(codes, code), params)
            for code in range(grid.offset == 128, 2**grid.bits)  # ggml never writes -128
        ]
    )
    least = (every.double() - weight).abs().amin(0)
    distance = (grid.decode(codes, params).double() - weight).abs()
    assert torch.all(distance <= least + 2e-6 * weight.abs() + 1e-12)
    assert torch.equal(grid.nearest(weight.clone(), params), grid.decode(codes, params))


MINS = [name for name in SCALAR if isinstance(named(name), kquants.MinGrid)]


@pytest.mark.parametrize("name", SCALAR)
def test_a_fit_is_what_the_encoder_stores(name):
    """Without importance, and with the fewer scales that K-quants with mins try. Codes as well, wherever the
    step is not 0 (IQ4 and 32-blocks round on d before that is a float16, so they may differ on them by
    one)."""
    grid = named(name)
    if name in MINS:
        grid = replace(grid, plan=kquants.QUICK)
    weight = weights()[:16, : grid.group_size].contiguous()
    params = grid.fit(weight)
    codes, stored = grid.quantize(weight)
    for field, part in vars(params).items():
        assert part is None or torch.equal(part, getattr(stored, field)[:, 0])
    error = (grid.nearest(weight.clone(), params) - weight).abs()
    assert torch.all(error <= (grid.decode(codes, params) - weight).abs() * (1 + 1e-6) + 1e-9)


@pytest.mark.parametrize("name", [name for name in SCALAR if named(name).weighted])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("spread", [0.3, 1, 2])
def test_a_fit_by_costs_loses_less_than_the_encoder(monkeypatch, name, heavy, spread):
    """ggml weighs by the sizes of the weights as well. For types with mins it tries twice as many scales,
    which is worth 0.2 % at most."""
    torch.manual_seed(0)
    grid = named(name)
    weight, costs = (
        torch.randn(1000, grid.group_size) * 0.05,
        torch.exp(torch.randn(grid.group_size) * spread),
    )
    if heavy:
        weight /= torch.distributions.Chi2(4.0).sample(weight.shape).div(4).sqrt()

    def lost(values):
        return float((costs * (values - weight).double().square()).sum())

    codes, stored = grid.quantize(weight, costs)
    encoded = lost(grid.decode(codes, group(stored, 0)))
    assert lost(grid.nearest(weight.clone(), grid.fit(weight, costs))) < 1.002 * encoded
    monkeypatch.setattr(kquants, "QUICK_WITH_IMPORTANCE", kquants.WITH_IMPORTANCE)
    assert 0.75 * encoded < lost(grid.nearest(weight.clone(), grid.fit(weight, costs))) < encoded


@pytest.mark.parametrize("name", SCALAR)
def test_scaling_scales_the_values(name):
    grid = named(name)
    weight = weights()[:8, : grid.group_size] * 50  # no subnormal float16
    params = grid.fit(weight)
    codes = grid.round(weight, params)
    factor = torch.linspace(0.5, 2, 8)
    scaled = grid.decode(codes, grid.scaled(params, factor))
    wanted = grid.decode(codes, params) * factor[:, None]
    assert torch.all((scaled - wanted).abs() <= 2**-10 * (wanted.abs() + wanted.abs().amax(1, keepdim=True)))
    for field, part in vars(grid.scaled(params, factor)).items():
        if field in ("d", "dmin", "m") and part is not None:
            assert torch.equal(part, part.half().float())


def test_scales_at_the_ends_of_float16_are_counted():
    grid = named("Q4_0")
    params = grid.fit(torch.tensor([1.0, 4e-7, 8 * 65504.0])[:, None].expand(3, 32).contiguous())
    assert grid.clipped(params) == 2


def test_sums_run_in_order():
    torch.manual_seed(5)
    for columns in (1, 2, 7, 8, 9, 1000):
        terms = torch.randn(32, columns) * 10.0 ** torch.randint(-3, 4, (32, columns))
        wanted = terms[0].clone()
        for term in terms[1:]:
            wanted += term
        assert torch.equal(total(terms), wanted)


def test_of_equal_magnitudes_the_first_counts():
    groups = torch.tensor([[0.5, -2.0, 2.0], [0.5, 2.0, -2.0], [1.0, 0.0, -3.0], [-0.0, -0.0, -0.0]])
    found = extreme(groups.t().contiguous())
    assert found.tolist() == [-2.0, 2.0, -3.0, 0.0]
    assert not found.signbit()[3]


def test_layout_says_what_it_cannot_hold():
    layout = GgmlLayout()
    spec = SimpleNamespace(grid=named("Q4_K"), in_features=512, out_features=8)
    assert layout.check(spec) is None
    assert layout.nbytes(spec) == 8 * 2 * 144
    spec = SimpleNamespace(grid=named("Q4_K"), in_features=288, out_features=8)
    assert layout.check(spec) == "in_features 288 is not a multiple of Q4_K's 256"
    spec = SimpleNamespace(grid=AffineGrid(4, 128), in_features=512, out_features=8)
    assert "4 bit, groups of 128" in layout.check(spec)


def test_errors_say_what_is_wrong():
    with pytest.raises(QuantkitError, match="do not divide into Q4_K blocks of 256"):
        encode_rows("Q4_K", torch.zeros(2, 288))
    with pytest.raises(QuantkitError, match="type I8 are not supported"):
        decode_rows("I8", torch.zeros(2, 4, dtype=torch.uint8), 4)
    with pytest.raises(QuantkitError, match="X: blocks of type Q8_K are not supported"):
        tensors = type("Tensors", (dict,), {"linear": "X"})(ggml_type=torch.tensor(15))
        GgmlLayout().decode(tensors)
    with pytest.raises(KeyError):
        named("Q9_K")
