"""The layout of ModelOpt: its own exports (`tests/data/modelopt.safetensors`), and whole jobs."""

import json
from dataclasses import replace
from pathlib import Path

import jobs
import pytest
import torch
from nights import by_day
from safetensors import safe_open
from safetensors.torch import load_file
from sums import assert_sums

from quantkit import layouts
from quantkit.capacity import source
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation.kv_cache import stored_scales
from quantkit.grids.float8 import FLOAT8, WHOLE, Float8Grid
from quantkit.grids.fp4 import NvFp4Grid
from quantkit.layouts import LinearSpec
from quantkit.layouts.modelopt import FILE, FLOAT8_CACHE, FORMS, ModelOptLayout, completed
from quantkit.models.files.open import open_checkpoint
from quantkit.models.skeleton import Skeleton
from quantkit.quantize.solvers import rtn

DATA = Path(__file__).parent / "data" / "modelopt.safetensors"
STORED = load_file(DATA)
with safe_open(DATA, "pt") as opened:
    TOLD = {algo: json.loads(told) for algo, told in json.loads(opened.metadata()["configurations"]).items()}
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
EMBEDDING = "model.embed_tokens"  # ModelOpt lists it, but no engine takes it for a linear
algos = pytest.mark.parametrize("algo", FORMS)


def case(algo: str, linear: str = "self_attn.k_proj") -> tuple[ModelOptLayout, dict[str, torch.Tensor]]:
    """The layout of ModelOpt's configuration, and the tensors of a linear."""
    linear = "mlp.down_proj" if algo == "fp8_pb_wo" else linear
    start = f"{algo}.{linear}."
    parts = {name.removeprefix(start): tensor for name, tensor in STORED.items() if name.startswith(start)}
    layout = layouts.detect({"quantization_config": TOLD[algo]["config"]})
    parts.pop("values", None)
    return layout.at(f"model.layers.0.{linear}"), parts


def row(layout: ModelOptLayout, shape: tuple[int, int], grid=None) -> LinearSpec:
    return LinearSpec("model.layers.0.mlp.up_proj", 0, "mlp.up_proj", *shape, grid)


# ---- what ModelOpt writes


def literal(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The codes times the scales."""
    scale = parts["weight_scale"]
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return parts["weight"].float() * (scale[:, None] if scale.ndim == 1 else scale)


@algos
def test_decode_equals_modelopt_bit_for_bit(algo):
    layout, parts = case(algo)
    weight = layout.decode(parts)
    oracle = STORED.get(f"{algo}.self_attn.k_proj.values")
    assert torch.equal(weight.values(), literal(parts) if oracle is None else oracle)
    spec = row(layout, weight.codes.shape, weight.grid)
    assert jobs.table(parts) == layout.tensors(spec) and layout.check(spec) is None
    assert layout.form == FORMS[algo]
    if "weight_scale_2" not in parts:
        again = layout.encode(weight)
        assert all(torch.equal(again[part].float(), parts[part].float()) for part in parts)


@algos
def test_configurations_are_those_of_modelopt(algo):
    spec = row(None, (256, 256), NvFp4Grid())
    layout = ModelOptLayout(FORMS[algo])
    made, told = layout.config([spec]), TOLD[algo]["config"]
    file, theirs = layout.files([spec])[FILE], TOLD[algo]["file"]
    for one, other in ((made, told), (file["quantization"], theirs["quantization"])):
        key = "ignore" if "ignore" in one else "exclude_modules"
        assert one == other | {key: ["lm_head"]} | ({"producer": made["producer"]} if key == "ignore" else {})
        assert list(one) == list(other) and other[key] == ["lm_head", EMBEDDING]
    assert (
        theirs["producer"]
        == {"name": "modelopt", "version": "0.47.0"}
        == theirs["producer"] | {key: made["producer"][key] for key in ("name", "version")}
    )


def test_a_cache_of_8_bit_floats_is_told_as_modelopt_tells_it():
    layout, spec = ModelOptLayout(FORMS["FP8"], cache=True), row(None, (64, 64), Float8Grid(64, WHOLE))
    made, told = layout.config([spec]), TOLD["FP8+KV"]["config"]
    assert made["kv_cache_scheme"] == told["kv_cache_scheme"] and list(made) == list(told)
    assert layout.files([spec])[FILE]["quantization"]["kv_cache_quant_algo"] == "FP8"
    names = {name.removeprefix("FP8+KV.self_attn.") for name in STORED if name.startswith("FP8+KV")}
    assert names == set(layout.cache_scales)


def test_modules_that_stay_are_told():
    specs = [
        row(None, (64, 64), NvFp4Grid()),
        LinearSpec("model.layers.1.mlp.up_proj", 1, "mlp.up_proj", 64, 64, None, kept="--exclude"),
    ]
    ignored = ModelOptLayout().config(specs, ["visual"])["ignore"]
    assert ignored == ["lm_head", "visual", "visual.*", "model.layers.1.mlp.up_proj"]
    head = LinearSpec("lm_head", 2, "lm_head", 64, 64, NvFp4Grid(), head=True)
    assert ModelOptLayout().config([specs[0], head])["ignore"] == []


def test_rows_are_rounded_to_the_bytes_of_modelopt():
    for linear in LINEARS:
        layout, parts = case("FP8_PER_CHANNEL_PER_TOKEN", linear)
        weight = STORED[f"{linear}.weight"].float()
        found = layout.encode(rtn.quantize(weight, Float8Grid(weight.shape[1], scale_dtype="float32")))
        assert all(torch.equal(found[part].float(), parts[part].float()) for part in parts)


def test_a_matrix_is_rounded_to_the_bytes_of_modelopt():
    """Which divides in bfloat16, so that some codes are rounded twice."""
    for linear in LINEARS:
        layout, parts = case("FP8", linear)
        weight = STORED[f"{linear}.weight"]
        found = rtn.quantize(weight.float(), Float8Grid(64, WHOLE, scale_dtype="float32"))
        encoded = layout.encode(replace(found, input_peak=parts["input_scale"] * 448))
        assert all(torch.equal(encoded[part], parts[part]) for part in ("weight_scale", "input_scale"))
        scale = parts["weight_scale"]
        assert torch.equal(encoded["weight"].float(), (weight.float() / scale).to(FLOAT8).float())
        assert torch.equal(parts["weight"].float(), (weight / scale).to(FLOAT8).float())


def test_linears_that_engines_fuse_share_the_largest_scale():
    weights = [STORED[f"{linear}.weight"].float() for linear in LINEARS[:3]]
    grid = Float8Grid(64, WHOLE, scale_dtype="float32").together(weights)
    assert not grid.joint and grid.together(weights[:1]) is grid
    assert grid.scale == max(case("FP8", linear)[1]["weight_scale"].item() for linear in LINEARS[:3])
    scales = [rtn.quantize(weight, grid).params.scale for weight in weights]
    assert all(
        (scale == grid.scale).all() and len(scale) == len(w) for scale, w in zip(scales, weights, strict=True)
    )


@pytest.mark.parametrize("search", [False, True])
def test_whole_matrices_have_one_scale(search):
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    plain, found = (rtn.quantize(weight, Float8Grid(32, WHOLE, one, "float32")) for one in (False, search))
    assert found.params.scale.shape == (40, 1) and (found.params.scale == found.params.scale[0]).all()
    assert (plain.params.scale == weight.abs().max() / 448).all()
    lost = [(one.values() - weight).square().sum() for one in (found, plain)]
    assert lost[0] < lost[1] if search else torch.equal(*lost)
    assert found.grid.floats(found.params)["scale"].shape == (1, 1)


# ---- inputs


@algos
def test_inputs_are_rounded_as_engines_round_them(algo):
    layout, parts = case(algo)
    values = layout.values(parts)
    inputs = torch.randn(5, values.shape[1], generator=torch.Generator().manual_seed(1)) * 2
    module = layout.module(parts, None, values, False)
    if algo == "W4A16_NVFP4":
        assert module is None and not layout.rounds_inputs
        return
    assert_sums(module(inputs), rounded(algo, inputs, parts) @ values.T)
    assert layout.rounds_inputs


def rounded(algo: str, inputs: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if algo == "NVFP4":
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        levels = torch.cat([levels, -levels[1:]])
        groups, divisor = inputs.view(5, -1, 16), 1 / parts["input_scale"]
        scale = groups.abs().amax(-1, keepdim=True) / 6 * divisor
        step = scale.clamp(max=448).to(FLOAT8).float() / divisor
        nearest = levels[((groups / step)[..., None] - levels).abs().argmin(-1)]
        return (nearest * step).view(inputs.shape)
    size = 128 if algo == "fp8_pb_wo" else inputs.shape[1]
    groups = inputs.view(5, -1, size)
    scale = parts.get("input_scale", groups.abs().amax(-1, keepdim=True) / 448)
    return ((groups / scale).clamp(-448, 448).to(FLOAT8).float() * scale).view(inputs.shape)


# ---- whole jobs


@pytest.fixture
def made(tiny_model, tmp_path):
    """`made("fp4", layout="modelopt")` -> the folder that a job wrote."""

    def make(method: str, **options) -> Path:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1} | heads
        make.source = tiny_model("llama", tokenizer=True, dtype="bfloat16", **sizes)
        output = tmp_path / "-".join([method, *map(str, options.values())])
        jobs.quantize(method, make.source, output, options, calibration=jobs.calibration(tmp_path))
        return output

    return make


NAMES = [f"model.layers.0.{name}" for name in (*LINEARS, "self_attn.o_proj", "mlp.down_proj")]
OPTIONS = {  # of both layouts, and what inspect says of the inputs
    "W4A16_NVFP4": ("fp4", {}, None),
    "NVFP4": ("fp4", {"activations": True}, "float4, groups of 16"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", {}, "float8, each token by itself"),
    "fp8_pb_wo": ("fp8", {"block": 128}, "float8, groups of 128"),
    "FP8": ("fp8", {"static": True}, "float8, by stored scales"),
}


@pytest.mark.parametrize("algo", by_day(OPTIONS, ["FP8", "NVFP4"]))
def test_a_job(made, quantkit, algo, tmp_path):
    method, options, inputs = OPTIONS[algo]
    options = {"solver": "rtn", "transform": "none"} | options
    folder = made(method, layout="modelopt", **options)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == algo and json.loads((folder / FILE).read_text())["quantization"]
    tensors, checkpoint = jobs.tensors(folder), open_checkpoint(str(folder))
    for name in NAMES:
        parts = {part: tensors[f"{name}.{part}"] for part in case(algo)[1]}
        layout = checkpoint.layout.at(name)
        assert layout.form == FORMS[algo]
        assert jobs.table(parts) == layout.tensors(row(layout, (128, 128), layout.decode(parts).grid))
    told = json.loads(quantkit("inspect", folder, "--deep", "--json").out)
    assert not told["integrity"]["problems"] and told["quantization"]["activations"] == inputs
    counted = source.read(str(folder)).parameters.tensors
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(one.in_file for one in counted) == nbytes
    (tmp_path / "text.txt").write_text(" ".join(["the same words"] * 60))
    plain = made(method, layout="compressed-tensors", **options)
    done = quantkit("eval", made.source, plain, folder, "--text", "text.txt", "--ctx", "32", "--json")
    first, second = (model["metrics"]["kld"]["mean"] for model in json.loads(done.out)["models"][1:])
    assert done.code == 0 and 0 < second < 1
    if algo != "FP8":  # whose matrices have one scale. 8-bit floats have scales of 32 bits instead of 16
        tolerances = {"W4A16_NVFP4": 0, "NVFP4": 1e-5}
        assert second == pytest.approx(first, rel=tolerances.get(algo, 0.15), abs=0)


@pytest.mark.parametrize("activations", [False, True])
def test_nvfp4_has_the_values_and_codes_of_compressed_tensors(made, activations):
    solver = "rtn" if activations else "gptq"  # rounded inputs differ in the last place
    options = {"activations": activations, "transform": "none", "refine": 0, "solver": solver}
    folders = [made("fp4", layout=layout, **options) for layout in ("modelopt", "compressed-tensors")]
    (ours, theirs), (one, other) = map(jobs.tensors, folders), (open_checkpoint(str(f)) for f in folders)
    for name in NAMES:
        assert torch.equal(ours[f"{name}.weight"], theirs[f"{name}.weight_packed"])
        assert torch.equal(ours[f"{name}.weight_scale"].float(), theirs[f"{name}.weight_scale"].float())
        assert ours[f"{name}.weight_scale_2"] * theirs[f"{name}.weight_global_scale"] == 1
        assert torch.equal(one.read(f"{name}.weight"), other.read(f"{name}.weight"))
        if activations:
            torch.testing.assert_close(
                ours[f"{name}.input_scale"], 1 / theirs[f"{name}.input_global_scale"][0], rtol=2e-7, atol=0
            )
    for group in (NAMES[:3], [NAMES[3], NAMES[3].replace("up", "gate")]):
        for part in ("weight_scale_2", *["input_scale"] * activations):
            assert len({ours[f"{name}.{part}"].item() for name in group}) == 1


def test_linears_that_engines_fuse_have_one_scale(made):
    tensors = jobs.tensors(made("fp8", layout="modelopt", static=True, solver="gptq", refine=0))
    for part in ("weight_scale", "input_scale"):
        assert len({tensors[f"{name}.{part}"].item() for name in NAMES[:3]}) == 1
    scales = {tensors[f"{name}.weight_scale"].item() for name in NAMES}
    assert len(scales) == 4, "q, k, v together; up (with gate); o; down"


def test_scales_of_the_cache_are_those_of_compressed_tensors(made):
    found, names = [], []
    for layout in ("modelopt", "compressed-tensors"):
        checkpoint = open_checkpoint(str(made("fp8", layout=layout, kv_cache=True)))
        found.append(stored_scales(Skeleton(checkpoint, torch.float32, torch.device("cpu"))))
        names += [name for name in checkpoint.infos if name.endswith(".k_scale")]
    assert found[0].keys() == found[1].keys() == {(0, "self_attn")}
    assert found[0][0, "self_attn"] == found[1][0, "self_attn"]
    assert names == [f"{NAMES[1]}.k_scale", "model.layers.0.self_attn.k_scale"]


def test_a_folder_with_hf_quant_config_alone_is_read(made, quantkit):
    folder = made("fp8", layout="modelopt", kv_cache=True)
    before = json.loads(quantkit("inspect", folder, "--deep", "--json").out)
    values = open_checkpoint(str(folder)).read(f"{NAMES[0]}.weight")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantkit.json").unlink()
    after = json.loads(quantkit("inspect", folder, "--deep", "--json").out)
    assert after["quantization"] == before["quantization"] | {"method": None}
    assert torch.equal(open_checkpoint(str(folder)).read(f"{NAMES[0]}.weight"), values)


def test_a_file_without_an_algorithm_changes_nothing():
    for told in ({}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, [], None):
        for stored in ({"quantization": told}, told if isinstance(told, dict) else None):
            assert completed({"a": 1}, lambda name, stored=stored: stored) == {"a": 1}
    told = {"quantization_config": {"quant_method": "gptq"}}
    assert completed(told, lambda name: {"quant_algo": "FP8"}) is told
    flat = {"quant_algo": "FP8", "kv_cache_scheme": FLOAT8_CACHE}
    found = completed({}, {FILE: flat}.get)["quantization_config"]
    assert found == flat | {"quant_method": "modelopt"}


# ---- what is refused


def test_layers_of_several_kinds():
    rows = {"a.q_proj": "FP8", "a.up_proj": "NVFP4", "a.mlp.experts": "W4A16_NVFP4"}
    told = {name: {"quant_algo": algo, "group_size": 16} for name, algo in rows.items()}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": told}
    layout = layouts.detect({"quantization_config": config})
    assert layout.rounds_inputs
    for name, algo in rows.items():
        inside = f"{name}.3.w1" if "experts" in name else name
        assert layout.at(inside).form == FORMS[algo]
    with pytest.raises(QuantkitError, match="a.k_proj is quantized"):
        layout.at("a.k_proj")


@pytest.mark.parametrize(
    "wrong",
    [
        {"quant_algo": "NVFP4_AWQ"}, {"quant_algo": None}, {}, {"quant_algo": "MIXED_PRECISION"},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A8"}}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}},
        {"quant_algo": "FP8", "kv_cache_scheme": "NVFP4"}, {"quant_algo": ["FP8"]},
    ],
)  # fmt: skip
def test_other_algorithms_are_refused(wrong):
    with pytest.raises(QuantkitError, match="ModelOpt's") as refused:
        layouts.detect({"quantization_config": {"quant_method": "modelopt"} | wrong})
    assert refused.value.exit_code == UNSUPPORTED


@pytest.mark.parametrize(
    ("algo", "part", "damaged"),
    [
        ("NVFP4", "weight_scale_2", torch.tensor(0.0)),
        ("NVFP4", "weight_scale_2", torch.tensor(torch.nan)),
        ("NVFP4", "weight_scale_2", torch.ones(2)),
        ("NVFP4", "weight_scale", torch.ones(32, 3).to(FLOAT8)),
        ("NVFP4", "weight", torch.ones(32, 32)),
        ("FP8", "weight_scale", torch.ones(32)),
        ("FP8", "input_scale", torch.ones(3)),
        ("FP8_PER_CHANNEL_PER_TOKEN", "weight_scale", torch.tensor(1.0)),
        ("fp8_pb_wo", "weight_scale", torch.ones(1, 2)),
    ],
)
def test_damage_is_refused_by_name(algo, part, damaged):
    layout, parts = case(algo)
    with pytest.raises(QuantkitError, match=part):
        layout.decode(parts | {part: damaged})


def test_what_the_layout_does_not_hold_is_refused(quantkit, tiny_model):
    model = tiny_model("llama", tokenizer=True)
    done = quantkit("fp4", model, "--layout", "modelopt", "--format", "mxfp4")
    assert done.code == USAGE and "holds nvfp4, not mxfp4" in done.err
    layout = ModelOptLayout(FORMS["fp8_pb_wo"])
    assert "in_features 192 is not a multiple of 128" in layout.check(row(layout, (256, 192)))
    assert "out_features 64" in layout.check(row(layout, (64, 128)))
