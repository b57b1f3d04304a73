"""`quantkit convert`: the same codes and scales in another layout."""

import json
import shutil

import families
import jobs
import pytest
import torch
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.inspection import verify
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize.convert import convert
from quantkit.quantize.progress import SILENT

OPTIONS = jobs.GPTQ | {"target": "own", "head": 8}
RUN = {"dtype": "float32"}
MIXED = {"override": (r"down_proj$=8,64",), "exclude": (r"layers\.1\.self_attn\.q_proj",)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a checkpoint by a method once."""
    folder, found = tmp_path_factory.mktemp("convert"), {}
    source, text = families.save_model(folder / "llama", "llama"), jobs.calibration(folder)
    families.save_tokenizer(source)

    def make(method="gptq", run=RUN, **options):
        key = repr((method, run, options))
        if key not in found:
            found[key] = folder / str(len(found))
            jobs.quantize(method, source, found[key], options, calibration=text, **run)
        return found[key]

    make.source = source
    return make


def values(folder):
    checkpoint = open_checkpoint(str(folder))
    return {name: checkpoint.read(name, torch.float32) for name in checkpoint.names}


def same(one, other):
    one, other = values(one), values(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("sym", [True, False])
def test_a_round_trip_gives_the_same_bytes(made, tmp_path, sym):
    """Mixed bits and groups, a linear in 16 bit and a packed head."""
    source = made("gptq", RUN | MIXED, **OPTIONS | {"sym": sym})
    record = convert(str(source), "compressed-tensors", tmp_path / "there", False, SILENT)
    assert (record["from"], record["to"], record["linears"]) == ("gptq", "compressed-tensors", 14 + 7)
    convert(str(tmp_path / "there"), "gptq", tmp_path / "back", False, SILENT)
    assert same(source, tmp_path / "there")
    for name in ("model.safetensors", "quantize_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("to", ["gptq", "awq", "compressed-tensors"])
def test_every_weight_keeps_its_value(made, tmp_path, to):
    source = made("gptq", **OPTIONS | {"head": 0})
    convert(str(source), to, tmp_path / to, False, SILENT)
    assert same(source, tmp_path / to)
    assert open_checkpoint(str(tmp_path / to)).layout.label in (to, "pack-quantized")
    found = verify.verify(str(tmp_path / to), str(made.source), lambda *_: None, False)
    assert not found["problems"] and all(row["agrees"] for row in found["linears"])


def test_awq_becomes_gptq(made, tmp_path):
    source = made("awq", group_size=32, candidates=3)
    convert(str(source), "gptq", tmp_path / "gptq", False, SILENT)
    assert same(source, tmp_path / "gptq")
    zeros = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.qzeros"]
    assert len(zeros.unique()) > 1  # its zero points vary


def test_mlx_stores_codes_scales_and_offsets(made, tmp_path):
    source = made("gptq", **OPTIONS)
    convert(str(source), "mlx", tmp_path / "mlx", False, SILENT)
    there, here = open_checkpoint(str(tmp_path / "mlx")), open_checkpoint(str(source))
    for name in here.packed:
        own, other = (side.layout.at(name).decode(side.parts(f"{name}.weight")) for side in (here, there))
        assert torch.equal(own.codes, other.codes)
        assert torch.equal(own.params.scale, other.params.scale.float())
        assert torch.equal(other.params.bias.float(), -own.params.scale * own.params.zero)


def test_what_would_change_is_refused_by_name(made, tmp_path):
    def refused(source, to):
        with pytest.raises(QuantkitError) as found:
            convert(str(source), to, tmp_path / "no", False, SILENT)
        assert not list(tmp_path.iterdir())
        return str(found.value)

    mixed = made("gptq", RUN | MIXED, **OPTIONS)
    assert "awq cannot hold 4 linears" in (text := refused(mixed, "awq"))
    assert "awq holds 4 bit, not 8" in text and ": lm_head, model.layers.0.mlp.down_proj" in text
    asymmetric = made("gptq", **OPTIONS | {"sym": False, "head": 0})
    assert "scales or offsets need more than float16" in refused(asymmetric, "mlx")
    ordered = made("gptq", **OPTIONS | {"act_order": "full", "head": 0})
    assert "the order of columns (--act-order full)" in refused(ordered, "compressed-tensors")
    assert "is in the layout bitsandbytes" in refused(made("nf4", solver="rtn"), "gptq")
    inputs = made("gptq", **OPTIONS | {"head": 0, "layout": "compressed-tensors", "activations": "fp8"})
    assert "also rounds the inputs" in refused(inputs, "compressed-tensors")
    assert "is not quantized" in refused(made.source, "gptq")
    assert "--to gguf: no such layout" in refused(mixed, "gguf")


def test_the_command_says_what_it_did(made, tmp_path, quantkit):
    source = made("gptq", **OPTIONS)
    done = quantkit("convert", source, "--to", "compressed-tensors", "-o", tmp_path / "out", "--json", "-q")
    record = json.loads(done.out)
    assert record["schema"] == "quantkit.convert/1" and record["output_bytes"] < record["source_bytes"]
    again = quantkit("convert", source, "--to", "compressed-tensors", "-o", tmp_path / "out", "-q")
    assert again.code == 2 and "exists" in again.err


def test_a_source_is_neither_replaced_nor_believed(made, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(made("gptq", **OPTIONS | {"head": 0, "group_size": -1}), source)
    convert(str(source), "compressed-tensors", tmp_path / "rows", False, SILENT)
    assert same(source, tmp_path / "rows")  # one scale a row
    before = (source / "config.json").read_bytes()
    with pytest.raises(QuantkitError):
        convert(str(source), "awq", source, True, SILENT)
    assert (source / "config.json").read_bytes() == before
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    with pytest.raises(QuantkitError, match="model.safetensors") as refused:
        convert(str(source), "awq", tmp_path / "awq", False, SILENT)
    assert refused.value.exit_code == 6
