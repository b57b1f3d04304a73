"""`quantkit convert`: the same codes and scales in another layout."""

import json
import re
import shutil

import families
import gguf
import jobs
import numpy as np
import pytest
import torch
import transformers
from nights import nightly
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.grids.distance import token_distances
from quantkit.inspection import verify
from quantkit.models.files import card
from quantkit.models.files.open import open_checkpoint
from quantkit.quantize import convert as conversion
from quantkit.quantize.convert import convert
from quantkit.quantize.progress import SILENT

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
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


@pytest.mark.parametrize("sym", [False, *nightly(True)])
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


@pytest.mark.parametrize("to", ["awq", "compressed-tensors"])
def test_every_weight_keeps_its_value(made, tmp_path, to):
    source = made("gptq", **OPTIONS | {"head": 0})
    convert(str(source), to, tmp_path / to, False, SILENT)
    assert same(source, tmp_path / to)
    assert open_checkpoint(str(tmp_path / to)).layout.label in (to, "pack-quantized")
    found = verify.verify(str(tmp_path / to), str(made.source), lambda *_: None, False)
    assert not found["problems"] and all(row["agrees"] for row in found["linears"])


def test_gptq_v2_becomes_gptq(made, tmp_path):
    source = made("gptq", **OPTIONS | {"head": 0, "checkpoint_format": "gptq_v2"})
    convert(str(source), "Q4_0", tmp_path / "new", False, SILENT)
    assert [path.suffix for path in sorted((tmp_path / "new").iterdir())] == [".gguf", ".md"]
    convert(str(source), "gptq", tmp_path / "gptq", False, SILENT)
    assert open_checkpoint(str(source)).raw_config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    written = open_checkpoint(str(tmp_path / "gptq"))
    assert written.raw_config["quantization_config"]["checkpoint_format"] == "gptq"
    assert same(source, tmp_path / "gptq")


def test_columns_in_another_order_are_told(made, tmp_path):
    source = made("gptq", **OPTIONS | {"head": 0, "act_order": "full", "checkpoint_format": "gptq_v2"})
    convert(str(source), "gptq", tmp_path / "new", False, SILENT)
    assert open_checkpoint(str(tmp_path / "new")).raw_config["quantization_config"]["desc_act"] is True
    assert same(source, tmp_path / "new")


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
    told = verify.verify(str(tmp_path / "mlx"), str(made.source), lambda *_: None)
    assert told["problems"] == [] and "no errors to compare with" in told["notes"][-1]


def permuted(values, heads):
    """Rows as llama.cpp wants those of q and k (LlamaModel.permute of its convert_hf_to_gguf.py)."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("to, sym, usual", [("q4_0", True, "Q4_0"), ("q8_0", False, "Q8_0")])
def test_a_gguf_file_has_the_values_bit_for_bit(made, tmp_path, to, sym, usual):
    """As the gguf package decodes them. Q8_0 has room for 4 bits with any zero point, and 8 bits fit Q8_0."""
    source = (
        made("gptq", RUN | MIXED, **OPTIONS | {"sym": True})
        if sym
        else made("awq", group_size=64, candidates=3)
    )
    record = convert(str(source), to, tmp_path / "out.gguf", False, SILENT)
    assert record["linears"] == 21
    here, config = values(source), open_checkpoint(str(source)).config
    kinds, heads = {}, {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        own = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        block, leaf = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        name = f"model.layers.{block}.{NAMES[leaf]}.weight" if block else f"{NAMES[leaf]}.weight"
        expected = here[name].numpy()
        expected = permuted(expected, heads[leaf]) if leaf in heads else expected
        assert own.dtype == np.float32 and own.tobytes() == expected.tobytes(), name
        kinds[name] = tensor.tensor_type.name
    assert kinds.keys() == here.keys()
    special = {"lm_head": "Q8_0", "model.layers.1.self_attn.q_proj": "F32"} if sym else {}
    special |= {f"model.layers.{k}.mlp.down_proj": "Q8_0" for k in range(3)}
    packed = set(open_checkpoint(str(source)).packed)
    expected = {name: special.get(name[:-7], usual if name[:-7] in packed else "F32") for name in here}
    assert kinds == expected
    assert not verify.verify(str(tmp_path / "out.gguf"), str(made.source), lambda *_: None)["problems"]
    with pytest.raises(QuantkitError, match="out.gguf exists"):
        convert(str(source), to, tmp_path / "out.gguf", False, SILENT)


def test_other_tools_checkpoints_and_other_names(tiny_model, tmp_path):
    """GPT-2's Conv1D, whose weights lie the other way, and no manifest in the source."""
    source, made = tiny_model("gpt2", tokenizer=True), tmp_path / "w4"
    jobs.quantize("gptq", source, made, OPTIONS | {"head": 0}, calibration=jobs.calibration(tmp_path))
    for name in ("quantkit.json", "README.md"):
        (made / name).unlink()
    assert convert(str(made), "q4_0", tmp_path / "out.gguf", False, SILENT)["linears"] == 12
    kinds = {row.tensor_type.name for row in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds == {"Q4_0", "F32"}
    found = verify.verify(str(tmp_path / "out.gguf"), None, lambda *_: None)
    assert not found["problems"] and [row["state"] for row in found["files"]] == ["same"]
    head, text = card.read(tmp_path / "out.gguf.md")
    assert "base_model" not in head and "- llama.cpp: `llama-server -m out.gguf`" in text
    deep = tiny_model("deepseek_v3", tokenizer=True)
    jobs.quantize("gptq", deep, tmp_path / "v3", OPTIONS | {"head": 0, "solver": "rtn"})
    with pytest.raises(
        QuantkitError, match="stores model.layers.0.self_attn.kv_b_proj.weight in another way"
    ):
        convert(str(tmp_path / "v3"), "q8_0", tmp_path / "v3.gguf", False, SILENT)
    assert not list(tmp_path.glob("v3.gguf*"))


def test_llama_cpp_computes_what_was_converted(made, tmp_path):
    """With its own rounding of activations; a wrong order of rows gives other logits altogether."""
    pytest.importorskip("xllamacpp")
    from llama_cpp import Llama

    source, ids = made("gptq", **OPTIONS | {"head": 0}), list(range(5, 37))
    convert(str(source), "q4_0", tmp_path / "out.gguf", False, SILENT)
    model = transformers.LlamaForCausalLM(open_checkpoint(str(made.source)).config).eval()
    model.load_state_dict(values(source))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    with Llama(tmp_path / "out.gguf") as llama:
        found = torch.from_numpy(llama.logits(ids))
    assert token_distances(found, expected).max() < 0.02
    assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.8


def test_what_would_change_is_refused_by_name(made, tmp_path):
    def refused(source, to):
        with pytest.raises(QuantkitError) as found:
            convert(str(source), to, tmp_path / ("no.gguf" if to[0] == "q" else "no"), False, SILENT)
        assert not list(tmp_path.iterdir())
        return str(found.value)

    mixed = made("gptq", RUN | MIXED, **OPTIONS)
    assert "awq cannot hold 4 linears" in (text := refused(mixed, "awq"))
    assert "awq holds 4 bit, not 8: model.layers.0.mlp.down_proj" in text and "layout" not in text
    assert "a head, which its clients read in 16 bit: lm_head;" in text
    asymmetric = made("gptq", **OPTIONS | {"sym": False, "head": 0})
    assert "its groups, scales or offsets do not fit" in refused(asymmetric, "mlx")
    assert "its groups, scales or offsets do not fit" in refused(asymmetric, "q4_0")
    assert "its groups, scales or offsets do not fit" in refused(
        made("gptq", **OPTIONS | {"group_size": 16}), "q8_0"
    )
    ordered = made("gptq", **OPTIONS | {"act_order": "full", "head": 0})
    assert "columns in another order" in refused(ordered, "compressed-tensors")
    assert "is in the layout bitsandbytes" in refused(made("nf4", solver="rtn"), "gptq")
    inputs = made("gptq", **OPTIONS | {"head": 0, "layout": "compressed-tensors", "activations": "fp8"})
    assert "also rounds the inputs" in refused(inputs, "compressed-tensors")
    assert "is not quantized" in refused(made.source, "gptq")
    with pytest.raises(QuantkitError) as found:
        convert(str(made.source), "awq", tmp_path / "no", False, SILENT)
    assert found.value.hint == f"compress it first: quantkit gptq {made.source}"
    assert "--to gguf: no such layout" in refused(mixed, "gguf")
    assert refused(mixed, "gptq") == f"{mixed} is in the layout gptq already"
    packed = made("gptq", **OPTIONS | {"head": 0, "layout": "compressed-tensors"})
    assert refused(packed, "Compressed-Tensors") == f"{packed} is in the layout compressed-tensors already"


def test_the_card_has_the_source_s_recipe_and_results(make, tiny_model, tmp_path):
    source = tiny_model("llama", name="models--org--tiny/snapshots/0123", tokenizer=True)
    (source / "README.md").write_text("---\nlicense: other\nlanguage: [en]\n---\n# Original\n")
    text = jobs.calibration(tmp_path).calibration
    options = ["--group-size", 32, "--samples", 6, "--seqlen", 32, "--target", "own", "--refine", 0]
    make("gptq", source, "-o", "w4", "--calibration", text, *options, "--eval", text)
    for to, place in (("awq", "w4-awq/README.md"), ("q4_0", "w4-Q4_0.gguf.md")):
        make("convert", "w4", "--to", to)
        (old, body), (head, text) = (card.read(tmp_path / one) for one in ("w4/README.md", place))
        kind = "gguf" if to == "q4_0" else to
        assert head == old | {
            "library_name": {"gguf": kind}.get(kind, "transformers"),
            "tags": ["quantkit", kind],
        }
        assert (head["base_model"], head["license"]) == ("org/tiny", "other") and head["model-index"]
        recipe = "".join(body.partition("## How it was made")[1:])
        assert (
            text.endswith(recipe.replace("makes the same model,", "makes w4,"))
            and "makes w4, with this recipe" in text
            and text.count("## Load it") == 1
            and "| w4 |" in text
            and "method: gptq" in text
        )
        load = {"awq": "- vLLM: `vllm serve w4-awq`", "q4_0": "- llama.cpp: `llama-server -m w4-Q4_0.gguf`"}
        assert load[to] in text and f"w4, converted to {to} by quantkit" in text
        assert make("verify", place.removesuffix("/README.md").removesuffix(".md"))["problems"] == []


def test_an_interrupted_conversion_keeps_what_is_packed(made, tmp_path, monkeypatch):
    source, packed = made("gptq", **OPTIONS), []
    encoded = conversion._encoded

    def stop(*arguments):
        packed.append(len(packed))
        if len(packed) == 6:
            raise KeyboardInterrupt
        return encoded(*arguments)

    monkeypatch.setattr(conversion, "_encoded", stop)
    for output in ("whole", "again"):
        with pytest.raises(KeyboardInterrupt):
            packed.clear()
            convert(str(source), "mlx", tmp_path / output, False, SILENT)
    with pytest.raises(QuantkitError, match="holds another job; different: to"):
        convert(str(source), "awq", tmp_path / "again", False, SILENT)
    convert(str(source), "mlx", tmp_path / "again", False, SILENT)
    assert len(packed) == 6 + 22 - 5
    convert(str(source), "mlx", tmp_path / "whole", True, SILENT)  # --overwrite starts afresh
    assert len(packed) == 6 + 22 - 5 + 22
    files = [
        {place.name: place.read_bytes() for place in (tmp_path / name).iterdir() if place.suffix != ".md"}
        for name in ("whole", "again")
    ]
    assert files[0] == files[1] and not list(tmp_path.glob("*.partial"))


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
