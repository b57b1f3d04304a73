"""GGUF files as checkpoints: what is read, what is refused, and jobs on them."""

import hashlib
import json
import random
from pathlib import Path

import gguf
import gguf_files
import jobs
import numpy as np
import pytest
import torch
from jobs import error_of
from nights import nightly
from safetensors.torch import load_file, save_file

from quantkit.errors import NOT_FOUND, QuantkitError
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import tensors
from quantkit.models.gguf.mixtures import stays_float


def edited(path: Path, change=lambda keys: None, drop=(), add=(), shapes=None) -> Path:
    """A copy of a GGUF file with other metadata, tensors less or more, or other shapes of them."""
    keys, infos = read_header(path)
    keys["tokenizer.ggml.token_type"] = np.array(keys["tokenizer.ggml.token_type"], dtype=np.int32)
    change(keys)
    kept = [info for name, info in infos.items() if name not in drop]
    entries = [Entry(info.name, info.dtype, (shapes or {}).get(info.name, info.shape)) for info in kept]
    new = path.with_name(f"edited-{path.name}")
    with writing(new, keys, [*entries, *add]) as write:
        for info in kept:
            write(info.name, [np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)])
        for entry in add:
            write(entry.name, [bytes(entry.nbytes)])
    return new


@pytest.fixture
def llama_file(tiny_model):
    folder = tiny_model("llama")
    return gguf_files.export(folder, folder.with_suffix(".gguf"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", *nightly("falcon", "stablelm")])
@pytest.mark.parametrize("type", ["BF16", "Q4_0", *nightly("F16", "Q8_0")])
def test_every_tensor_is_what_the_file_says(tiny_model, family, type):
    """Values equal the gguf package's decoding of the same rows, in transformers' order and orientation."""
    changes = {"qk_layernorm": True} if family == "stablelm" else {}
    changes |= {"query_pre_attn_scalar": 16} if family == "gemma2" else {}
    folder = tiny_model(family, **changes)
    original = open_checkpoint(str(folder))
    path = gguf_files.export(folder, folder.with_suffix(".gguf"), type)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.quantized == type.startswith("Q")
    assert set(checkpoint.names) == set(original.names)
    decoded = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for target in tensors.of_checkpoint(original):
        assert checkpoint.infos[target.parameters[0]].shape == original.infos[target.parameters[0]].shape
        wanted = target.to_hf(torch.from_numpy(decoded[target.name].reshape(target.shape).copy()))
        read = [checkpoint.read(name, torch.float32) for name in target.parameters]
        found = torch.stack(read) if len(read) > 1 else read[0].t() if target.conv1d else read[0]
        assert torch.equal(found, wanted), target.name
        if type != "F16" or stays_float(target.name, target.shape):
            continue
        assert checkpoint.read(target.parameters[0]).dtype == torch.float16
    sizes = {info.name: info.nbytes for info in checkpoint.infos.values()}
    assert sum(sizes.values()) == sum(t.n_bytes for t in gguf.GGUFReader(path).tensors)
    assert checkpoint.disk_bytes == path.stat().st_size


def test_norms_that_a_file_stores_with_1_added_are_read_in_float32(tiny_model):
    """Gemma 3 270M's norms reach 40. In bfloat16, 1 + w has fewer digits after the point than w."""
    folder = tiny_model("gemma3", query_pre_attn_scalar=16)
    stored = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in stored.items():
        stored[name] = (4 * torch.randn(tensor.shape) if tensor.ndim == 1 else tensor).to(torch.bfloat16)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(str(gguf_files.export(folder, folder.with_suffix(".gguf"), "BF16")))
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.read(name, torch.bfloat16), tensor), name


def test_configuration_of_a_file_by_llama_cpp_s_own_tools(tiny_model):
    """Their files have keys we do not write and lack keys that we do."""
    folder = tiny_model("llama", tie_word_embeddings=True)
    path = gguf_files.export(folder, folder.with_suffix(".gguf"), "Q8_0")

    def change(keys):
        for key in ("attention.key_length", "attention.value_length", "vocab_size", "rope.freq_base"):
            del keys[f"llama.{key}"]
        del keys["tokenizer.ggml.bos_token_id"]
        keys |= {
            "general.sampling.top_k": 40,
            "quantize.imatrix.file": "x",
            "llama.rope.scaling.type": "none",
        }

    checkpoint = open_checkpoint(str(edited(path, change)))
    config, original = checkpoint.config, open_checkpoint(str(folder)).config
    for name in ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "rms_norm_eps",
                 "rope_parameters", "tie_word_embeddings", "max_position_embeddings"):  # fmt: skip
        assert getattr(config, name) == getattr(original, name), name
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 1, None)
    assert checkpoint.raw_config["architectures"] == ["LlamaForCausalLM"]


def test_hash_and_name(llama_file, tmp_path):
    checkpoint = open_checkpoint(str(llama_file))
    other = edited(llama_file, lambda keys: keys.update({"general.name": "Other"}))
    assert checkpoint.name == "llama" and open_checkpoint(str(other)).name == "Other"
    assert checkpoint.sha256() != open_checkpoint(str(other)).sha256()
    assert checkpoint.sha256() == hashlib.sha256(llama_file.read_bytes()).hexdigest()


def test_a_file_is_known_by_its_content(llama_file, tmp_path):
    unnamed = tmp_path / "output"
    unnamed.write_bytes(llama_file.read_bytes())
    assert open_checkpoint(str(unnamed)).config.model_type == "llama"
    (tmp_path / "text.txt").write_text("hello")
    error = error_of(open_checkpoint, str(tmp_path / "text.txt"))
    assert error.exit_code == NOT_FOUND and "or a GGUF file" in error.hint


EXPERTS = {"llama.expert_count": 8, "llama.expert_used_count": 2}
WRONG = {  # what is done to the file -> what the error says
    "architecture": (lambda k: k.update({"general.architecture": "rwkv7"}), {}, "GGUF files of rwkv7"),
    "no architecture": (lambda k: k.pop("general.architecture"), {}, "GGUF files of no architecture"),
    "no width": (lambda k: k.pop("llama.embedding_length"), {}, "lacks llama.embedding_length"),
    "no epsilon": (lambda k: k.pop("llama.attention.layer_norm_rms_epsilon"), {}, "layer_norm_rms_epsilon"),
    "sizes by block": (
        lambda k: k.update({"llama.feed_forward_length": [128, 64, 128]}),
        {},
        "no single positive number for llama.feed_forward_length",
    ),
    "endless": (lambda k: k.update({"llama.block_count": 1 << 30}), {}, "block_count 1073741824"),
    "wide heads": (lambda k: k.update({"llama.attention.key_length": 1 << 30}), {}, "key_length 1073741824"),
    "many heads": (lambda k: k.update({"llama.attention.head_count": 1 << 30}), {}, "head_count 1073741824"),
    "another width": (lambda k: k.update({"llama.embedding_length": 32}), {}, "instead of"),
    "another depth": (lambda k: k.update({"llama.block_count": 2}), {}, "unknown tensors: blk.2."),
    "a block more": (lambda k: k.update({"llama.block_count": 4}), {}, "lacks blk.3."),
    "experts": (lambda k: k.update(EXPERTS), {}, "lacks blk.0.ffn_down_exps.weight"),
    "no experts chosen": (lambda k: k.update({"llama.expert_count": 8}), {}, "lacks llama.expert_used_count"),
    "many experts": (lambda k: k.update(EXPERTS | {"llama.expert_count": 1 << 30}), {}, "1073741824"),
    "words for numbers": (lambda k: k.update({"llama.rope.freq_base": "many"}), {}, "knows: TypeError"),
    "scaling": (lambda k: k.update({"llama.rope.scaling.type": "spiral"}), {}, "scaled by 'spiral'"),
    "a tensor less": (lambda k: None, {"drop": ["blk.1.ffn_up.weight"]}, "lacks blk.1.ffn_up.weight"),
    "no embedding": (lambda k: None, {"drop": ["token_embd.weight"]}, "lacks token_embd.weight"),
    "a tensor more": (
        lambda k: None,
        {"add": [Entry("blk.0.attn_sinks.weight", "F32", (4,))]},
        "unknown tensors: blk.0.attn_sinks.weight",
    ),
    "another shape": (
        lambda k: None,
        {"shapes": {"blk.0.ffn_up.weight": (64, 128)}},
        "blk.0.ffn_up.weight is [64, 128] instead of [128, 64]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_make_no_model_are_refused(llama_file, case):
    change, tensors_changed, why = WRONG[case]
    path = edited(llama_file, change, **tensors_changed)
    assert why in error_of(open_checkpoint, str(path)).message


def test_metadata_of_any_type_are_an_error_of_ours_or_harmless(llama_file):
    source = random.Random(0)
    values = (-1, 0, 1, 3, 1 << 40, 0.0, -2.5, float("nan"), True, "", "text", [1, 2], ["a"], [0.5])
    names = [key for key in read_header(llama_file)[0] if key.startswith(("llama.", "general.n"))]
    for _ in range(50):
        key, value = source.choice(names), source.choice(values)
        try:
            checkpoint = open_checkpoint(
                str(edited(llama_file, lambda keys, k=key, v=value: keys.update({k: v})))
            )
        except QuantkitError:
            continue
        assert checkpoint.read("model.layers.0.self_attn.q_proj.weight").shape == (64, 64), (key, value)


def test_weights_of_types_that_hold_none_are_refused(llama_file):
    def type_of(name, code):
        """Patch a tensor's type in the header."""
        content = bytearray(llama_file.read_bytes())
        place = content.index(name.encode()) + len(name) + 4 + 8 * len(read_header(llama_file)[1][name].shape)
        content[place] = code
        path = llama_file.with_name("typed.gguf")
        path.write_bytes(content)
        return path

    error = error_of(open_checkpoint, str(type_of("blk.0.ffn_up.weight", gguf.GGMLQuantizationType.I32)))
    assert "blk.0.ffn_up.weight (I32)" in error.message
    error = error_of(open_checkpoint, str(type_of("output_norm.weight", gguf.GGMLQuantizationType.Q8_0)))
    assert "output_norm.weight (Q8_0)" in error.message


# ---- files as sources of jobs


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_job_on_a_file_writes_what_it_writes_from_the_folder(tiny_model, tmp_path, family, monkeypatch):
    """F32 tensors survive the way through GGUF: permuted, transposed and shifted ones, too."""
    folder = tiny_model(family, **({"query_pre_attn_scalar": 16} if family == "gemma2" else {}))
    path = gguf_files.export(folder, folder.with_suffix(".gguf"))
    monkeypatch.setattr("quantkit.models.gguf.checkpoint.GgufCheckpoint.write_companions", lambda *_: None)
    jobs.quantize("nf4", folder, tmp_path / "from-folder")
    jobs.quantize("nf4", path, tmp_path / "from-file")
    expected, found = jobs.tensors(tmp_path / "from-folder"), jobs.tensors(tmp_path / "from-file")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        tolerance = 1.2e-7 if family == "gemma2" and "norm" in name else 0.0
        assert (found[name].float() - tensor.float()).abs().max() <= tolerance, name
    config = json.loads((tmp_path / "from-file" / "config.json").read_text())
    assert config["model_type"] == family and config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"


def test_a_quantized_file_is_a_source_only_on_demand(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.models.gguf.checkpoint.GgufCheckpoint.write_companions", lambda *_: None)
    folder = tiny_model("llama")
    path = gguf_files.export(folder, folder.with_suffix(".gguf"), "Q8_0")
    error = error_of(jobs.quantize, "nf4", path, tmp_path / "out")
    assert "is quantized already" in error.message and not (tmp_path / "out").exists()
    how, heard = {"allow_requantize": True, "exclude": ("down_proj",)}, jobs.Listener()
    jobs.loop.run([jobs.prepare("nf4", path, tmp_path / "out", progress=heard, **how)], jobs.Progress())
    values = 2 * 512 * 64 + 3 * 64 * 128
    q8, f32 = (f"{bits * values / 8 / 1e6:.2f} MB" for bits in (8.5, 32))
    names = "lm_head, model.embed_tokens, model.layers.0.mlp.down_proj and 2 more"
    assert f"{names}: Q8_0 in the source, F32 in the output ({q8} → {f32})" in heard.warnings
    written, source = open_checkpoint(str(tmp_path / "out")), open_checkpoint(str(path))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        assert torch.equal(written.read(name), source.read(name)) and written.infos[name].dtype == "F32"


def test_an_output_over_the_source_is_refused(llama_file):
    for method, output in (("gguf", llama_file), ("nf4", llama_file.parent)):
        error = error_of(jobs.prepare, method, llama_file, output)
        assert "holds the source" in error.message
