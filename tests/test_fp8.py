"""quantkit fp8: the grid against torch's own float8, both layouts there and back, and whole jobs."""

import json
import math
from itertools import product

import families
import jobs
import pytest
import torch
from nights import nightly
from sums import assert_sums

from quantkit import layouts
from quantkit.capacity.source import of_quantized
from quantkit.distillation.student import refuse_unlike
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation.settings import EvalSettings
from quantkit.evaluation.stream import StreamedModel, Trial
from quantkit.grids.float8 import FLOAT8, Float8Grid, MxFp8Grid, from_float8, nearest, to_float8
from quantkit.inspection import record
from quantkit.layouts import LinearSpec
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.floats import FloatQuantized, MxFp8
from quantkit.layouts.fp8 import Fp8Layout
from quantkit.models.files import headers
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton, caches
from quantkit.quantize import loop, methods
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import rtn
from quantkit.quantize.solvers.gptq import GptqSolver

OUT, IN = 300, 256


def random_weight(out_features: int = OUT, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of unlike size, one of zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(out_features, 1, generator=generator))
    weight = sizes * torch.randn(out_features, IN, generator=generator) / 20
    weight[5] = 0
    return weight.to(dtype).float()


# ---- the grid


def test_every_byte_stands_for_what_torch_says():
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    numbers = every[(every & 127) != 127]
    for codes in (numbers, every, every.t(), every[:0]):
        expected = codes.view(FLOAT8).float()
        assert torch.equal(from_float8(codes).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert from_float8(numbers)[126].item() == 448 and from_float8(every).isnan().sum() == 2
    assert torch.signbit(from_float8(numbers)).sum() == 127, "-0 keeps its sign"


def test_nearest_is_the_conversion_to_float8():
    """Over every exponent, both signs, ties and what is too large."""
    bits = torch.arange(0, 2**31, 99991).to(torch.int32).view(torch.float32)
    bits = bits[bits.isfinite()]
    levels = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float().nan_to_num()
    middles = (levels.sort().values[1:] + levels.sort().values[:-1]) / 2
    for values in (bits, -bits, levels, middles):
        expected = values.clamp(-448, 448).to(FLOAT8)
        assert torch.equal(nearest(values), expected.float())
        assert torch.equal(to_float8(values).view(torch.uint8), expected.view(torch.uint8))


def test_rows_are_scaled_as_llm_compressor_scales_them():
    """absmax / 448 in bfloat16; codes are the nearest, of the weight divided in float32."""
    weight = random_weight()
    found = rtn.quantize(weight, Float8Grid(IN))
    scale = weight.bfloat16().abs().amax(1, keepdim=True) / 448
    scale[5] = torch.finfo(torch.bfloat16).eps
    assert torch.equal(found.params.scale, scale.float())
    codes = (weight / scale.float()).clamp(-448, 448).to(FLOAT8)
    assert torch.equal(found.codes, codes.view(torch.uint8))
    assert torch.equal(found.values(), codes.float() * scale.float())
    theirs = (weight.bfloat16() / scale).clamp(-448, 448).to(FLOAT8)  # rounded twice
    moved = theirs.view(torch.uint8) != found.codes
    assert 0 < moved.float().mean() < 0.05
    missed = (theirs.float() * scale.float() - weight).abs() - (found.values() - weight).abs()
    assert (missed >= 0).all()


def test_blocks_share_the_scale_of_their_largest_weight():
    weight = random_weight()
    found = rtn.quantize(weight, Float8Grid(128, 128, scale_dtype="float32"))
    for row in range(0, OUT, 128):
        for group in range(2):
            block = weight[row : row + 128, group * 128 : (group + 1) * 128]
            assert (found.params.scale[row : row + 128, group] == block.abs().max() / 448).all()
    assert torch.equal(found.grid.nearest(weight.view(-1, 128).clone(), _flat(found)), _rounded(found))


def _flat(found):
    return type(found.params)(found.params.scale.flatten())


def _rounded(found):
    return found.values().view(-1, 128)


def test_groups_share_the_power_of_two_by_which_nothing_is_cut_off():
    """The exponent of the specification, floor(log2(largest)) - 8; one more if the largest exceeds 448."""
    weight = random_weight()
    weight[0, :32] = torch.tensor([1.75, 1.7499, -1.75, 0.1] * 8)
    weight[1, :32] = torch.tensor([1.7499, 1.0, -0.3, 0.1] * 8)
    found = rtn.quantize(weight, MxFp8Grid())
    assert found.params.scale[:2, 0].tolist() == [2.0**-7, 2.0**-8]
    for row, group in product(range(OUT), range(IN // 32)):
        part = weight[row, group * 32 :][:32]
        largest = part.abs().max().item()
        if largest == 0:
            continue
        exponent = math.floor(math.log2(largest)) - 8
        scale = 2.0 ** (exponent + (largest >= 448 * 2.0**exponent))
        assert found.params.scale[row, group] == scale
        codes = (part / scale).to(FLOAT8)
        assert torch.equal(found.codes[row, group * 32 :][:32], codes.view(torch.uint8))
    with pytest.raises(QuantkitError, match="too far apart to be trained"):
        found.floats()


@pytest.mark.parametrize("rows, columns", [(1, IN), (128, 128)])
def test_a_search_finds_no_worse_scales(rows, columns):
    weight = random_weight()
    plain = rtn.quantize(weight, Float8Grid(columns, rows)).values() - weight
    searched = rtn.quantize(weight, Float8Grid(columns, rows, search=True)).values() - weight
    blocks = [part.square().sum((1, 3)) for part in (_blocks(plain, rows), _blocks(searched, rows))]
    assert (blocks[1] <= blocks[0] * (1 + 1e-5)).all()
    assert blocks[1].sum() < 0.9 * blocks[0].sum()


def _blocks(missed: torch.Tensor, rows: int) -> torch.Tensor:
    missed = torch.nn.functional.pad(missed, (0, 0, 0, -len(missed) % rows))
    return missed.view(len(missed) // rows, rows, -1, 128 if rows > 1 else IN)


@pytest.mark.parametrize("rows, columns", [(1, IN), (128, 128)])
def test_error_feedback_loses_less(rows, columns):
    """On correlated inputs, at the outputs; the rows of a block keep one scale."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(IN, IN, generator=generator) / 16 + torch.eye(IN) / 2
    inputs = torch.randn(4096, IN, generator=generator) @ mix
    hessian = 2 * inputs.T @ inputs / len(inputs)
    weight, grid = random_weight(), Float8Grid(columns, rows, search=True)
    (solved,) = GptqSolver().solve([weight], [grid], hessian)
    assert solved.fallback is None and solved.error < 0.6 * solved.rtn_error
    scale = solved.weight.params.scale
    assert torch.equal(scale, scale.bfloat16().float())
    for row in range(0, OUT, rows):
        assert (scale[row : row + rows] == scale[row]).all()


# ---- layouts


LAYOUTS = {
    "rows": (CompressedTensorsLayout(FloatQuantized()), Float8Grid(IN)),
    "blocks": (CompressedTensorsLayout(FloatQuantized(128)), Float8Grid(128, 128)),
    "static": (CompressedTensorsLayout(FloatQuantized(None, True)), Float8Grid(IN)),
    "mx": (CompressedTensorsLayout(MxFp8()), MxFp8Grid()),
    "deepseek": (Fp8Layout(), Float8Grid(128, 128, scale_dtype="float32")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_read_as_they_were_written(name):
    layout, grid = LAYOUTS[name]
    weight = rtn.quantize(random_weight(256), grid)
    if name == "static":
        weight = type(weight)(grid, weight.codes, weight.params, input_peak=torch.tensor(7.0))
    tensors = layout.encode(weight)
    spec = LinearSpec("model.layers.0.mlp.up_proj", 0, "mlp.up_proj", 256, IN, grid)
    assert layout.check(spec) is None and jobs.table(tensors) == layout.tensors(spec)
    config = json.loads(json.dumps({"quantization_config": layout.config([spec])}))
    reader = layouts.detect(config).at(spec.name)
    for one in (layout, reader):
        found = one.decode(tensors)
        assert found.grid == grid and torch.equal(found.codes, weight.codes)
        assert torch.equal(found.values(), weight.values())
        if name != "mx":
            refuse_unlike(one, spec.name, tensors)  # what distill demands
            again = one.with_floats(tensors, {"scale": weight.floats()["scale"] * 2})
            assert torch.equal(one.decode(again).values(), 2 * weight.values())
        inputs = torch.randn(3, IN, generator=torch.Generator().manual_seed(2)) * 3
        wanted = literal(name, inputs) @ weight.values().T
        values = one.values(tensors)
        assert_sums(one.module(tensors, None, values, False)(inputs), wanted)
        assert_sums(one.module(tensors, None, 2 * values, False)(inputs), 2 * wanted)
    if name == "static":
        assert tensors["input_scale"].tolist() == [torch.tensor(7 / 448).bfloat16()]


def literal(name: str, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs as engines round them."""
    size = {"blocks": 128, "deepseek": 128, "mx": 32}.get(name, IN)
    parts = inputs.view(3, -1, size)
    scale = parts.abs().amax(-1, keepdim=True) / 448
    if name == "mx":
        scale = 2 ** scale.log2().ceil()
    if name == "static":
        scale = torch.tensor(7 / 448).bfloat16().float()
    return ((parts / scale).clamp(-448, 448).to(FLOAT8).float() * scale).view_as(inputs)


def test_what_deepseek_s_layout_does_not_hold():
    spec = LinearSpec("a.b", 0, "b", 300, 256, Float8Grid(128, 128))
    assert Fp8Layout().check(spec) == "out_features 300 is not a multiple of 128"
    for config in ({"weight_block_size": None}, {"weight_block_size": [128, 128], "expert_dtype": "fp4"}):
        with pytest.raises(QuantkitError, match="is not supported") as raised:
            layouts.detect({"quantization_config": {"quant_method": "fp8"} | config})
        assert raised.value.exit_code == UNSUPPORTED
    tensors = Fp8Layout().encode(rtn.quantize(random_weight(256), LAYOUTS["deepseek"][1]))
    with pytest.raises(QuantkitError, match="weight_scale_inv is .* instead of"):
        Fp8Layout().decode(tensors | {"weight_scale_inv": torch.ones(3, 2)})


MX_WRONG = (
    {"layout": "modelopt"}, {"static": True}, {"block": 128}, {"search_scale": True},
    {"layout": "mlx", "kv_cache": True},
)  # fmt: skip


def test_options_that_make_no_sense():
    for options in (
        {"block": 64},
        {"block": 128, "static": True},
        {"layout": "deepseek", "static": True},
        {"layout": "mlx"},
        *({"format": "mxfp8"} | more for more in MX_WRONG),
    ):
        with pytest.raises(QuantkitError) as raised:
            methods.create("fp8", **options).check()
        assert raised.value.exit_code == USAGE


# ---- jobs


@pytest.mark.parametrize(
    "options", [{}, {"block": 128}, {"layout": "deepseek"}, {"format": "mxfp8"}], ids=str
)
def test_a_job_rounds_every_linear_to_nearest(options, short_demo, tmp_path):
    """The job itself has run what it wrote, inputs rounded; here are its values."""
    jobs.quantize("fp8", short_demo, tmp_path / "out", options)
    written, source = open_checkpoint(str(tmp_path / "out")), open_checkpoint(str(short_demo))
    method = methods.create("fp8", **options).build()
    for linear in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = source.read(f"{linear}.weight").float()
        expected = rtn.quantize(weight, method.make_grid(linear, weight.shape[1], None)).values()
        assert torch.equal(written.read(f"{linear}.weight"), expected)


def test_static_scales_are_the_largest_input_of_the_calibration_text(demo_model, tmp_path):
    text = jobs.calibration(tmp_path)
    told = jobs.quantize("fp8", demo_model, tmp_path / "out", {"static": True}, calibration=text)
    assert told.activations == "float8, by stored scales"
    scales = {n: t for n, t in jobs.tensors(tmp_path / "out").items() if n.endswith("input_scale")}
    assert len(scales) == 42 and all(0 < float(t) < 10 and t.shape == (1,) for t in scales.values())
    first = "model.layers.0.self_attn"
    assert len({float(scales[f"{first}.{name}_proj.input_scale"]) for name in "qkv"}) == 1


def test_attention_whose_cache_has_an_unknown_name_is_refused(demo_model, quantkit, monkeypatch):
    """As transformers 5.24 renamed it: no scale would be stored."""
    monkeypatch.setattr(caches, "PARAMETERS", ("another",))
    done = quantkit("fp8", demo_model, "--kv-cache", "--samples", 4, "--seqlen", 32, "--dry-run")
    assert done.code == 4 and "no attention of this model takes its keys" in done.err


@pytest.mark.parametrize(("family", "blocks"), [("olmo_hybrid", {2}), ("glm_moe_dsa", {0, 1, 2})])
def test_only_attention_gets_scales(tmp_path, family, blocks):
    """Not linear attention, whose projections have the same names, nor an indexer in an attention."""
    families.save_model(tmp_path / "model", family)
    families.save_tokenizer(tmp_path / "model")
    text, out = jobs.calibration(tmp_path), tmp_path / "out"
    jobs.quantize("fp8", tmp_path / "model", out, {"kv_cache": True}, calibration=text, dtype="float32")
    names = {name for name in jobs.tensors(out) if name.endswith(".k_scale")}
    assert names == {f"model.layers.{index}.self_attn.k_scale" for index in blocks}


def test_scales_of_the_cache_are_the_largest_value_of_the_calibration_text(demo_model, tmp_path):
    text, out = jobs.calibration(tmp_path), tmp_path / "out"
    job = jobs.prepare("fp8", demo_model, out, {"kv_cache": True}, calibration=text, dtype="float32")
    told = loop.run([job], Progress())[0]
    assert told.activations == "float8, each token by itself; keys and values float8, by stored scales"
    before, after = (record.describe(headers.at(str(at), at))["model"] for at in (demo_model, out))
    assert after["parameters"] == before["parameters"]  # no scale is one
    assert sum(entry.in_file for entry in of_quantized(headers.at(str(out), out))) == after["bytes"]
    scales = {n: t for n, t in jobs.tensors(out).items() if n.endswith(("k_scale", "v_scale"))}
    assert len(scales) == 12 and all(t.shape == (1,) for t in scales.values())
    written = Skeleton(open_checkpoint(str(out)), torch.float32, torch.device("cpu"))
    written.load_rest()
    written.load_block(0)
    seen = []
    attention = written.blocks[0].self_attn
    attention.v_proj.register_forward_hook(lambda module, args, values: seen.append(values.abs().max()))
    for ids in job.batches:
        written.run_block(0, written.embed(ids))
    largest = (torch.stack(seen).max() / 448).bfloat16()
    assert torch.equal(scales["model.layers.0.self_attn.v_scale"], largest[None])
    model = StreamedModel.open(open_checkpoint(str(out)), torch.float32, torch.device("cpu"))
    rounded = model.cache._rounding_of(0, "self_attn").values(torch.tensor([1.0, -1e9, 0.0]))
    expected = torch.stack(
        [(1 / largest.float()).to(FLOAT8).float(), torch.tensor(-448.0), torch.tensor(0.0)]
    )
    assert torch.equal(rounded, expected * largest.float())


def test_what_was_typed_wrongly_is_told_before_what_is_in_the_way(demo_model, tmp_path):
    (tmp_path / "out").mkdir()
    for typed, said in (
        ({"override": ("down_proj=8",)}, "one width"),
        ({"exclude": ("nothing",)}, "no linear"),
    ):
        with pytest.raises(QuantkitError, match=said):
            jobs.prepare("fp8", demo_model, tmp_path / "out", **typed)
    with pytest.raises(QuantkitError, match="exists"):
        jobs.prepare("fp8", demo_model, tmp_path / "out")


@pytest.mark.parametrize(
    "asked",
    ["fp8,block=128", "w8a8,solver=rtn,transform=none", *nightly("fp8,format=mxfp8", "fp4,solver=rtn")],
)
def test_a_trial_with_options_computes_what_the_written_model_does(short_demo, tmp_path, asked):
    method, *settings = asked.split(",")
    options = {
        key: int(value) if value.isdecimal() else value for key, value in (s.split("=") for s in settings)
    }
    jobs.quantize(method, short_demo, tmp_path / "out", options)
    source, cpu = open_checkpoint(str(short_demo)), torch.device("cpu")
    tried = StreamedModel.open(source, torch.float32, cpu, Trial.prepare(asked, source))
    written = StreamedModel.open(open_checkpoint(str(tmp_path / "out")), torch.float32, cpu)
    ids = [torch.arange(16)[None]]
    (expected,), (found,) = (model.states(ids, lambda *_: None) for model in (written, tried))
    assert torch.equal(found, expected)
    assert tried.name == f"{short_demo} as {asked}"


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ("fp4", "needs calibration text", "--as fp4,solver=rtn,transform=none rounds to nearest"),
        ("fp4,format=mxfp4", "needs", "--as fp4,format=mxfp4,solver=rtn,transform=none rounds"),
        ("w8a8", "needs calibration text", "--as w8a8,solver=rtn,transform=none rounds"),
        ("gguf,type=Q4_K_M", "gguf cannot be tried in memory", "write it with quantkit gguf"),
        ("fp8,static=true", "needs calibration text", "write it with quantkit fp8"),
        ("fp8,blok=128", "unknown keys: blok", "did you mean block"),
        ("fp8,block=100", "no engine has kernels", "128"),
        ("gptq,solver=rtn,transform=none,head=8", "only linears of blocks", "leave head=8 out, or write it"),
        ("fp9", "no such method", "choose fp8 or int8 or nf4"),
    ],
)
def test_what_cannot_be_tried_says_what_to_type(demo_model, asked, said, hint):
    with pytest.raises(QuantkitError, match=said) as refused:
        Trial.prepare(asked, open_checkpoint(str(demo_model)))
    assert hint in refused.value.hint


def test_a_method_that_writes_files_only_is_refused_with_the_flags():
    with pytest.raises(QuantkitError, match="gguf cannot be tried in memory"):
        EvalSettings(trials=("gguf,type=Q4_K_M",)).check()
