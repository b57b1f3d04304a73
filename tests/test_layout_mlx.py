"""quantkit.layouts.mlx against mlx's own results, and whole jobs.

`tests/clients/mlx_tensors.py tests/data/mlx.safetensors` wrote these, in an environment with mlx."""

import json
import re
from pathlib import Path

import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import layouts
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.grids.affine import AffineGrid
from quantkit.grids.biased import BiasedGrid
from quantkit.layouts import LinearSpec
from quantkit.layouts.mlx import MlxLayout
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.solvers import rtn

STORED = load_file(Path(__file__).parent / "data" / "mlx.safetensors")
CASES = sorted({name.rpartition(".")[0] for name in STORED})


def case(name: str) -> tuple[MlxLayout, dict[str, torch.Tensor], torch.Tensor]:
    """The layout, what mx.quantize stores, and what mx.dequantize makes of it."""
    mode, bits, group, _ = name.split(".")
    parts = {part: STORED[key] for part in MlxLayout.suffixes if (key := f"{name}.{part}") in STORED}
    return MlxLayout(int(bits), int(group), mode), parts, STORED[f"{name}.values"]


@pytest.mark.parametrize("name", CASES)
def test_decode_equals_mlx_bit_for_bit(name):
    layout, parts, values = case(name)
    weight = layout.decode(parts)
    assert torch.equal(weight.values(), values.float())
    row = LinearSpec("a.b", 0, "b", *values.shape, weight.grid)
    assert jobs.table(parts) == layout.tensors(row)
    again = layout.encode(weight)
    assert again.keys() == parts.keys()
    assert all(torch.equal(again[part], parts[part]) and again[part].is_contiguous() for part in parts)


@pytest.mark.parametrize("name", [name for name in CASES if re.match(r"affine\.[2-5]", name)])
def test_the_grid_loses_less_than_mlx_does(name):
    """Than the range of each group, as in `mx.quantize`. In 6 and 8 bits the stored type costs as much."""
    layout, _, values = case(name)
    weight = values.float() + 0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(layout.group_size, generator=torch.Generator().manual_seed(1))
    groups = weight.view(-1, layout.group_size)
    grid = layout.grid(AffineGrid(layout.bits, layout.group_size), values.dtype)
    lost = []
    for one in (grid, grid.plain(), AffineGrid(layout.bits, layout.group_size, symmetric=False)):
        params = one.fit(groups, importance)
        lost.append(((one.decode(one.round(groups, params), params) - groups).square() @ importance).sum())
    assert lost[0] < lost[1] and lost[0] < 1.05 * lost[2]
    params = grid.fit(groups)
    assert params.scale.dtype == params.bias.dtype == values.dtype
    step, low = grid.steps(params)
    codes = grid.round(groups, params)
    exact = codes.float() * step[0, :, None] - low[0, :, None]
    assert torch.allclose(grid.decode(codes, params), exact, rtol=0, atol=float(2**-6 * exact.abs().max()))


def test_the_grid_takes_odd_groups():
    """Of zeros, of one value, of one sign."""
    groups = torch.stack([torch.zeros(32), torch.full((32,), 5.0), torch.linspace(1, 2, 32)])
    grid = BiasedGrid(4, 32)
    params = grid.fit(groups)
    values = grid.decode(grid.round(groups, params), params)
    assert torch.equal(values[0], groups[0])
    assert (values - groups).abs().max() < 0.1
    assert (params.scale > 0).all()


def test_detect_reads_what_mlx_lm_writes():
    own = {"group_size": 64, "bits": 4}
    entries = {"lm_head": {"group_size": 32, "bits": 8, "mode": "mxfp8"}, "model.norm": False}
    layout = layouts.detect({"quantization": own | entries, "quantization_config": own | entries})
    assert layout == MlxLayout(4, 64, entries={"lm_head": entries["lm_head"]})
    assert layout.at("lm_head") == MlxLayout(8, 32, "mxfp8") and layout.at("a.b") == MlxLayout(4, 64)
    assert (layout.at("lm_head").label, layout.at("a.b").label) == ("mxfp8", "mlx")


@pytest.mark.parametrize(
    "wrong",
    [{"bits": 7}, {"bits": "4"}, {"group_size": 0}, {"group_size": 16}, {"mode": "nvfp4"}, {"bits": True}],
)
def test_detect_refuses_numbers_that_mlx_does_not_have(wrong):
    with pytest.raises(QuantkitError, match="which MLX's"):
        layouts.detect({"quantization": {"group_size": 64, "bits": 4} | wrong})
    with pytest.raises(QuantkitError, match="which MLX's"):
        layouts.detect({"quantization": {"group_size": 64, "bits": 4, "a.b": wrong}})
    with pytest.raises(QuantkitError, match="'fp3'") as refused:
        layouts.detect({"quantization": {"group_size": 64, "bits": 4, "mode": "fp3"}})
    assert refused.value.exit_code == UNSUPPORTED


def test_damaged_tensors_are_refused():
    layout, parts, _ = case("affine.4.64.float16")
    for part, broken in (
        ("weight", parts["weight"][:, :-1].contiguous()), ("scales", parts["scales"][:1]),
        ("biases", parts["biases"][:, :1].contiguous()), ("weight", parts["weight"].view(torch.int32)),
    ):  # fmt: skip
        with pytest.raises(QuantkitError):
            layout.decode(parts | {part: broken})
    with pytest.raises(QuantkitError, match="do not fit one another"):
        MlxLayout(8, 64).decode(parts)


@pytest.fixture
def made(tiny_model, tmp_path):
    """`made("gptq", {...})` -> source and folder that a job wrote."""

    def make(method: str, options: dict, dtype: str = "bfloat16", **run) -> tuple[Path, Path]:
        source = tiny_model("llama", tokenizer=True, dtype=dtype, hidden_size=64, intermediate_size=64)
        calibration = jobs.calibration(tmp_path)
        output = tmp_path / "made"
        jobs.quantize(method, source, output, options | {"layout": "mlx"}, calibration=calibration, **run)
        return source, output

    return make


def test_a_job_writes_what_mlx_lm_reads(made):
    source, folder = made("gptq", jobs.GPTQ, override=("down_proj=8,64",))
    tensors, config = jobs.tensors(folder), json.loads((folder / "config.json").read_text())
    down = "model.layers.0.mlp.down_proj"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    quantization = config["quantization"]
    assert {key: value for key, value in quantization.items() if not isinstance(value, dict)} == {
        "group_size": 32, "bits": 4, "mode": "affine",
    }  # fmt: skip
    assert quantization[down] == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert config["quantization_config"] == {"quant_method": "mlx"} | quantization
    up = "model.layers.0.mlp.up_proj"
    found = {part: tensors[f"{up}.{part}"] for part in MlxLayout.suffixes}
    scales = "BF16", (64, 2)
    assert jobs.table(found) == {"weight": ("U32", (64, 8)), "scales": scales, "biases": scales}
    checkpoint, plain = open_checkpoint(str(folder)), open_checkpoint(str(source))
    lost = [(checkpoint.read(f"{n}.weight") - plain.read(f"{n}.weight").float()).norm() for n in (up, down)]
    norm = plain.read(f"{up}.weight").float().norm()
    assert lost[0] < 0.11 * norm and lost[1] < 0.02 * norm


def test_scales_have_the_type_of_the_model(made):
    _, folder = made("gptq", jobs.GPTQ | {"solver": "rtn"}, dtype="float32")
    assert jobs.tensors(folder)["model.layers.0.mlp.up_proj.scales"].dtype == torch.float32


@pytest.mark.parametrize("method, form", [("fp4", "mxfp4"), ("fp4", "nvfp4"), ("fp8", "mxfp8")])
def test_floats(made, method, form):
    _, folder = made(method, {"format": form, "solver": "rtn", "transform": "none"})
    found = jobs.tensors(folder)
    name = "model.layers.0.mlp.up_proj"
    assert f"{name}.biases" not in found and found[f"{name}.scales"].dtype == torch.uint8
    assert json.loads((folder / "config.json").read_text())["quantization"]["mode"] == form


def test_embedding_and_head_may_be_packed(made, quantkit):
    """As mlx_lm.convert writes them."""
    source, folder = made("gptq", jobs.GPTQ | {"solver": "rtn"})
    tensors, layout = jobs.tensors(folder), MlxLayout(4, 32)
    weight = tensors.pop("model.embed_tokens.weight")
    parts = layout.encode(rtn.quantize(weight.float(), BiasedGrid(4, 32)))
    tensors |= {f"model.embed_tokens.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "quantkit.json").unlink()
    done = quantkit("inspect", folder, "--deep", "--json")
    record = json.loads(done.out)
    assert not record["integrity"]["problems"]
    assert record["quantization"]["stored"] == {"4 bit, groups of 32": record["quantization"]["linears"]}
    (folder.parent / "text.txt").write_text(" ".join(["the same words"] * 60))
    told = quantkit("eval", source, folder, "--text", "text.txt", "--ctx", "32", "--json")
    assert 0 < json.loads(told.out)["models"][1]["metrics"]["kld"]["mean"] < 1
    made_again = quantkit(
        "gptq", folder, "-o", "again", "--solver", "rtn", "--allow-requantize", "--group-size", "32"
    )
    assert "modules besides the blocks' linears are quantized: model.embed_tokens" in made_again.err


def test_experts_are_stacked_and_packed_routers_read(tiny_model, tmp_path, quantkit):
    """As mlx-lm does both."""
    source = tiny_model("qwen3_moe", tokenizer=True, num_hidden_layers=1)
    flags = ["--solver", "rtn", "--group-size", "32", "--layout", "mlx"]
    mixed = quantkit("gptq", source, "-o", "made", *flags, "--override", r"experts\.1\.=8")
    assert mixed.code == UNSUPPORTED and "all experts of a layer have the same bits" in mixed.err
    done = quantkit("gptq", source, "-o", "made", *flags, "--override", "up_proj=8")
    assert done.code == 0
    place = tmp_path / "made"
    config = json.loads((place / "config.json").read_text())["quantization"]
    assert config["model.layers.0.mlp.switch_mlp.up_proj"]["bits"] == 8
    tensors, made = jobs.tensors(place), open_checkpoint(str(place))
    experts = [name for name in made.infos if ".experts." in name]
    assert len(experts) == 36 and not [name for name in tensors if ".experts." in name]
    for name in experts:
        number, stack = re.search(r"experts\.(\d+)", name)[1], re.sub(r"experts\.\d+", "switch_mlp", name)
        assert torch.equal(made.load(name), tensors[stack][int(number)])

    gate = "model.layers.0.mlp.gate"
    router = rtn.quantize(tensors.pop(f"{gate}.weight").float(), BiasedGrid(4, 32))
    tensors |= {f"{gate}.{part}": tensor for part, tensor in MlxLayout(4, 32).encode(router).items()}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "quantkit.json").unlink()
    record = json.loads(quantkit("inspect", "made", "--deep", "--json").out)
    assert not record["integrity"]["problems"] and record["quantization"]["bits"] == [4, 8]
    (tmp_path / "text.txt").write_text(" ".join(["the same words"] * 60))
    told = quantkit("eval", source, "made", "--text", "text.txt", "--ctx", "32", "--json")
    assert 0 < json.loads(told.out)["models"][1]["metrics"]["kld"]["mean"] < 1
