"""compressed-tensors' forms of 4-bit floats: round trips, damage, what others write, what engines fuse."""

import json

import jobs
import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.grids.fp4 import MxFp4Grid, NvFp4Grid
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout, detect
from quantkit.layouts.compressed_tensors.activations import QuantizedInputLinear, to_fp4
from quantkit.layouts.compressed_tensors.floats import MxFp4Packed, NvFp4Packed
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.solvers import rtn

FORMS = {"nvfp4": (NvFp4Packed, NvFp4Grid), "mxfp4": (MxFp4Packed, MxFp4Grid)}
both = pytest.mark.parametrize("name", FORMS)


def weight() -> torch.Tensor:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(0)) * 0.05


def stored(name: str, **options) -> tuple[CompressedTensorsLayout, dict, torch.Tensor]:
    """The layout that a configuration describes, the tensors of a linear, and its values."""
    form, grid = FORMS[name]
    found = rtn.quantize(weight(), grid())
    group = {
        "targets": ["Linear"],
        "weights": form(**options).weights(),
        "input_activations": form(**options).activations(),
        "format": form.NAME,
    }
    layout = detect({"quant_method": "compressed-tensors", "config_groups": {"g": group}}).at("a.b")
    return layout, CompressedTensorsLayout(form()).encode(found), found.values()


@both
def test_a_linear_comes_back(name):
    layout, tensors, values = stored(name)
    assert tensors["weight_packed"].dtype == torch.uint8 and tensors["weight_packed"].shape == (24, 32)
    for reader in (layout, CompressedTensorsLayout(FORMS[name][0]())):
        weight = reader.decode(tensors)
        assert torch.equal(weight.values(), values)
        again = CompressedTensorsLayout(FORMS[name][0]()).encode(weight)
        assert all(torch.equal(again[part].float(), tensors[part].float()) for part in tensors)


def test_the_first_of_two_codes_has_the_low_bits():
    layout, tensors, values = stored("mxfp4")
    byte, scale = int(tensors["weight_packed"][3, 0]), 2.0 ** (int(tensors["weight_scale"][3, 0]) - 127)
    positive = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for place, code in enumerate((byte & 15, byte >> 4)):
        assert values[3, place] == scale * positive[code & 7] * (-1 if code & 8 else 1)


def test_any_divisor_is_read_and_written_again():
    """As llm-compressor has it: 2688 by the largest weight."""
    layout, tensors, _ = stored("nvfp4")
    tensors["weight_global_scale"] = torch.tensor([1932.94384765625])
    found = layout.decode(tensors)
    wanted = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    assert torch.equal(found.params.step, wanted)
    again = CompressedTensorsLayout(NvFp4Packed()).encode(found)
    assert all(torch.equal(again[part].float(), tensors[part].float()) for part in tensors)


@pytest.mark.parametrize(
    ("name", "part", "damaged"),
    [
        ("nvfp4", "weight_scale", torch.zeros(24, 4)),
        ("nvfp4", "weight_scale", torch.zeros(24, 3).to(torch.float8_e4m3fn)),
        ("nvfp4", "weight_global_scale", torch.ones(2)),
        ("nvfp4", "weight_global_scale", torch.zeros(1)),
        ("mxfp4", "weight_scale", torch.zeros(24, 4, dtype=torch.uint8)),
        ("mxfp4", "weight_scale", torch.zeros(24, 2).to(torch.float8_e4m3fn)),
        ("mxfp4", "weight_packed", torch.zeros(24, dtype=torch.uint8)),
    ],
)
def test_damage_is_refused_by_name(name, part, damaged):
    layout, tensors, _ = stored(name)
    with pytest.raises(QuantkitError, match=part):
        layout.decode(tensors | {part: damaged})


def test_a_weight_of_another_kind_than_said_is_refused():
    layout, tensors, _ = stored("mxfp4")
    with pytest.raises(QuantkitError, match="weight_scale"):
        stored("nvfp4")[0].decode(tensors)


def test_inputs_go_to_the_nearest_value_halves_to_even():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(to_fp4(halves), wanted) and torch.equal(to_fp4(-halves), -wanted)


@both
def test_a_linear_that_rounds_its_inputs(name):
    """Inputs that are values of the grid pass as they are, others do not."""
    layout, tensors, values = stored(name, quantize_inputs=True)
    if name == "nvfp4":
        tensors["input_global_scale"] = torch.tensor([16.0])
    module = layout.module(tensors, None, layout.values(tensors), False)
    assert isinstance(module, QuantizedInputLinear)
    exact = torch.tensor([0.0, 0.5, 1.0, -1.5, 2.0, 3.0, -4.0, 6.0] * 8)[None, None]
    torch.testing.assert_close(module(exact), exact @ values.T)
    other = exact * 1.03 + 0.1
    assert not torch.allclose(module(other), other @ values.T, rtol=1e-3)


@pytest.mark.parametrize("solver", ("rtn", "gptq"))
def test_what_engines_fuse_has_one_divisor(tiny_model, quantkit, tmp_path, solver):
    """q, k and v of unlike size; likewise the experts' gate and up, which Mixtral calls w1 and w3."""
    model = tiny_model("mixtral", tokenizer=True, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    with jobs.edited(model) as tensors:
        for name in (name for name in tensors if "k_proj" in name or "w3" in name):
            tensors[name] *= 16
    calibrated = ["--samples", "2", "--seqlen", "32"] if solver == "gptq" else []
    done = quantkit("fp4", model, "-o", "made", "--solver", solver, "-q", "--allow-unread", *calibrated)
    assert done.code == 0, done.err
    tensors = load_file(tmp_path / "made/model.safetensors")
    divisors = {
        name.removesuffix(".weight_global_scale"): tensor.item()
        for name, tensor in tensors.items()
        if name.endswith("weight_global_scale")
    }
    for one, others in (("q_proj", ("k_proj", "v_proj")), ("w1", ("w3",))):
        firsts = [name for name in divisors if name.endswith(one)]
        assert firsts
        for first in firsts:
            assert all(divisors[first.removesuffix(one) + other] == divisors[first] for other in others)
    config = json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized"
    checkpoint = open_checkpoint(str(tmp_path / "made"))
    values = checkpoint.read("model.layers.0.self_attn.q_proj.weight").float()
    assert torch.equal(values.bfloat16().float(), values) and values.any()


@pytest.mark.parametrize("more", ([], ["--format", "mxfp4"]))
def test_a_job_takes_the_bytes_that_were_planned(tiny_model, make, tmp_path, more):
    model = tiny_model("llama", tokenizer=True, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    asked = ["fp4", model, "--activations", "--samples", "2", "--seqlen", "32", *more]
    planned = make(*asked, "--dry-run")["plan"]["output_bytes"]
    made = make(*asked, "-o", "made")
    tensors = load_file(tmp_path / "made/model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == planned
    packed = [name for name in tensors if "_proj." in name]
    scales = ("weight_scale",) if more else ("weight_scale", "weight_global_scale", "input_global_scale")
    assert {name.rpartition(".")[2] for name in packed} == {"weight_packed", *scales}
    groups = 8 / 32 if more else 8 / 16
    assert made["bits_per_weight"] == pytest.approx(4 + groups, abs=0 if more else 0.1)
