"""Quantized models and GGUF files: parameters of their originals, and the files as they are."""

import json
import struct
from dataclasses import replace

import gguf_files
import jobs
import pytest
import torch
from families import FAMILIES, GROUPED, save_model, save_tokenizer
from nights import by_day

from quantkit.capacity import forecast, formats, parameters, source
from quantkit.capacity.job import of_model
from quantkit.capacity.kv_cache import layer_caches
from quantkit.capacity.question import Question
from quantkit.errors import QuantkitError
from quantkit.models.files.gguf_writer import Entry, writing
from quantkit.models.files.headers import open_contents
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import methods

QUESTION = forecast.Question()


def save_headers(folder, tensors: dict, config: dict) -> None:
    """A checkpoint that is all header: the file has its size, but nothing was written into it."""
    sizes, header, end = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "U32": 4}, {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = sizes[dtype]
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))


def test_blocks_for_further_tokens_are_stored_and_not_read(tmp_path):
    tensors = {"model.embed_tokens.weight": ("BF16", (512, 64)), "lm_head.weight": ("BF16", (512, 64))}
    for block in range(3):  # the last predicts further tokens
        tensors[f"model.layers.{block}.mlp.up_proj.weight"] = "BF16", (128, 64)
    config = {**GROUPED, "model_type": "llama", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    save_headers(tmp_path / "m", tensors, config)
    found = source.read(str(tmp_path / "m"))
    assert found.parameters.count == 2 * 512 * 64 + 3 * 128 * 64
    assert formats.weights("bf16", found.parameters).read_bytes == 2 * (512 + 2 * 128) * 64


LAYOUTS = {  # method, options
    "gptq": ("gptq", {"solver": "rtn"}),
    "awq": ("awq", {"candidates": 2}),
    "int8": ("int8", {}),
    "nf4": ("nf4", {"double_quant": False}),
    "compressed-tensors": ("gptq", {"solver": "rtn", "layout": "compressed-tensors"}),
    "fp8": ("fp8", {"layout": "deepseek"}),
}


@pytest.fixture
def packed(tmp_path):
    """A plain tiny Llama in float16, it with its linears in another layout, and the bytes of that."""

    def make(method: str, options: dict) -> tuple[source.Source, source.Source, int]:
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_key_value_heads": 4,
            "num_hidden_layers": 1,
        }
        plain = save_model(tmp_path / "plain", "llama", dtype="float16", **sizes)
        save_tokenizer(plain)
        text = jobs.calibration(tmp_path)
        jobs.quantize(method, plain, tmp_path / "packed", options, calibration=text)
        stored = jobs.tensors(tmp_path / "packed").values()
        found = (source.read(str(tmp_path / name)) for name in ("plain", "packed"))
        return *found, sum(tensor.nbytes for tensor in stored)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_checkpoint_has_the_parameters_of_its_original(packed, layout):
    whole, found, nbytes = packed(*LAYOUTS[layout])
    assert found.layout and found.parameters.exact and whole.layout is None
    expected = {(t.name, t.shape, t.out_features, t.nbytes) for t in whole.parameters.tensors}
    assert {(t.name, t.shape, t.out_features, t.nbytes) for t in found.parameters.tensors} == expected
    assert found.parameters.stored_bytes == nbytes
    plain, record = forecast.of_source(whole, QUESTION), forecast.of_source(found, QUESTION)
    stored = record["weights"].pop("stored")
    assert stored["bytes"] == nbytes
    coded = sum(tensor.in_file for tensor in found.parameters.linears)
    weights = sum(tensor.size for tensor in found.parameters.linears)
    assert stored["bytes_per_weight"] == coded / weights < 1.3
    assert stored["read_bytes"] == nbytes - 2 * 512 * 128  # all but the embedding
    assert record["weights"] == {key: row for key, row in plain["weights"].items() if key != "stored"}
    assert record["kv_cache"] == plain["kv_cache"] and record["method"] == "stored"
    for job in record["job"].values():
        assert job["needs"] == "--allow-requantize" and job["peak_memory_bytes"]
    assert {job["needs"] for job in plain["job"].values()} == {None}


def test_shapes_that_no_header_tells_are_those_of_the_family(packed):
    """bitsandbytes keeps them in a text, which is out of reach on the hub."""
    whole, found, _ = packed(*LAYOUTS["nf4"])
    contents = replace(open_contents(found.name), path=None)
    entries = source.of_quantized(contents)
    assert {e.name: e.shape for e in entries} == {t.name: t.shape for t in whole.parameters.tensors}
    strange = source.of_quantized(replace(contents, config=contents.config | {"model_type": "strange"}))
    assert sum(torch.Size(entry.shape).numel() for entry in strange) == whole.parameters.count
    assert parameters.from_headers(strange, whole.settings).linears == []


def test_experts_in_mxfp4(tmp_path):
    """gpt-oss: blocks of 32 values of 4 bit with a scale of 8."""
    tensors = {"model.embed_tokens.weight": ("BF16", (512, 64)), "lm_head.weight": ("BF16", (512, 64))}
    for block in range(2):
        name = f"model.layers.{block}.mlp.experts.gate_up_proj"
        tensors[f"{name}_blocks"] = "U8", (4, 256, 2, 16)
        tensors[f"{name}_scales"] = "U8", (4, 256, 2)
        tensors[f"{name}_bias"] = "BF16", (4, 256)
    config = {**GROUPED, "model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 4}
    config |= {"num_experts_per_tok": 1, "quantization_config": {"quant_method": "mxfp4"}}
    save_headers(tmp_path / "m", tensors, config)
    found = source.read(str(tmp_path / "m"))
    experts = found.parameters.linears
    assert {tensor.name for tensor in experts if tensor.block == 1} == {
        f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
        for expert in range(4)
        for name in ("gate", "up")
    }
    assert {tensor.shape for tensor in experts} == {(128, 64)}
    assert sum(tensor.in_file for tensor in experts) == 2 * 4 * 256 * 2 * 17
    assert found.parameters.count == 2 * 512 * 64 + 2 * 4 * 256 * 65
    read = formats.weights("stored", found.parameters).read_bytes
    assert read == 2 * 512 * 64 + 2 * (4 * 256 * 2 * 17 + 2 * 4 * 256) // 4


def test_of_modelopt_the_parameters_are_known(tmp_path):
    method = {"quantization_config": {"quant_method": "modelopt"}}
    parts = {
        "weight": ("U8", (128, 32)),
        "weight_scale": ("F8_E4M3", (128, 4)),
        "weight_scale_2": ("F32", ()),
    }
    tensors = {"model.embed_tokens.weight": ("BF16", (512, 64))}
    for block in range(GROUPED["num_hidden_layers"]):
        tensors |= {f"model.layers.{block}.mlp.up_proj.{part}": told for part, told in parts.items()}
    save_headers(tmp_path / "m", tensors, {**GROUPED, "model_type": "llama", **method})
    found = source.read(str(tmp_path / "m")).parameters
    linears = [tensor for tensor in found.tensors if "up_proj" in tensor.name]
    assert [tensor.shape for tensor in linears] == [(128, 64)] * GROUPED["num_hidden_layers"]
    assert found.count == 512 * 64 + 128 * 64 * len(linears)


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": ("U32", (128, 16)), "scales": ("BF16", (128, 2))},  # MLX
        {"qweight": ("I32", (16, 128)), "scales": ("F32", (7,))},
    ],
)
def test_what_is_stored_otherwise_is_refused_rather_than_counted_wrongly(tmp_path, parts):
    tensors = {"model.embed_tokens.weight": ("BF16", (512, 64))}
    for block in range(3):
        tensors |= {f"model.layers.{block}.mlp.up_proj.{part}": told for part, told in parts.items()}
    config = {**GROUPED, "model_type": "llama", "quantization_config": {"bits": 4}}
    save_headers(tmp_path / "m", tensors, config)
    with pytest.raises(
        QuantkitError, match=r"stores .*layers\.0\.mlp\.up_proj.* in an unknown way"
    ) as refused:
        source.read(str(tmp_path / "m"))
    assert refused.value.exit_code == 4 and "--params" in refused.value.hint


# ---- GGUF


DAY = ("llama", "gpt2", "phi3", "gemma3", "bloom", "mistral")


@pytest.mark.processor
@pytest.mark.parametrize("family", by_day([name for name in FAMILIES if name != "opt"], DAY))
def test_a_float_gguf_file_is_planned_as_its_checkpoint(tmp_path, family):
    """But for a window of Mistral's, which llama.cpp does not have."""
    gemma = {"query_pre_attn_scalar": 16, "sliding_window": 16}
    gemma |= {"num_hidden_layers": 6, "layer_types": None} if family == "gemma3" else {}
    changes = gemma if family.startswith("gemma") else {"sliding_window": None} if family == "mistral" else {}
    folder = save_model(tmp_path / family, family, **changes)
    path = gguf_files.export(folder, tmp_path / "model.gguf")
    question = forecast.Question(ctx=100)
    whole, found = (forecast.of_source(source.read(str(place)), question) for place in (folder, path))
    assert found["parameters"]["basis"] == "the GGUF header" and not found["parameters"]["quantized"]
    for row in (found, whole):  # BLOOM's configuration has no context
        del row["kv_cache"]["reserved"], row["architecture"]["context"]
    assert found["kv_cache"] == whole["kv_cache"]
    model_type = "llama" if family == "mistral" else whole["architecture"]["model_type"]
    assert found["architecture"] == whole["architecture"] | {"model_type": model_type}
    assert found["weights"]["stored"]["bytes"] == pytest.approx(path.stat().st_size, abs=20000)
    assert found["parameters"]["count"] == whole["parameters"]["count"]
    for name in ("bf16", "int8", "Q4_K_M", "Q8_0"):
        assert found["weights"][name]["bytes"] == whole["weights"][name]["bytes"], name
    for method, job in whole["job"].items():
        for key in ("above_interpreter_bytes", "dtype", "output_bytes", "needs", "reason"):
            assert found["job"][method].get(key) == job.get(key), (method, key)


def test_the_cache_of_latent_attention_is_that_of_the_checkpoint(tmp_path):
    folder = save_model(tmp_path / "model", "deepseek_v3")
    path = gguf_files.export(folder, tmp_path / "model.gguf")
    found, whole = (source.read(str(place)) for place in (path, folder))
    caches = layer_caches(found.settings, found.parameters)
    assert caches == layer_caches(whole.settings, whole.parameters)
    assert [(cache.kind, cache.values) for cache in caches] == [("latent", 80)] * 3
    assert forecast.of_source(whole, QUESTION)["architecture"]["attention"] == "MLA"


def of_job(path, tmp_path) -> tuple:
    """Precision and memory of an int8 job on a checkpoint, as the job plans them and as the forecast does."""
    text = CalibrationOptions(samples=8, seqlen=64)
    run = RunOptions(threads=1, batch_size=8, allow_requantize=True)
    method, output = methods.create("int8"), tmp_path / "out"
    request = jobs.job.Request(str(path), method, text, run, output=output)
    planned = jobs.job.prepare(request, jobs.Progress(), dry_run=True).plan
    found = of_model(source.read(str(path)), Question(samples=8, seqlen=64))["int8"]
    return (planned.execution.dtype, planned.memory_bytes), (found["dtype"], found["above_interpreter_bytes"])


@pytest.mark.processor
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0"])
def test_the_precision_of_a_job_on_a_gguf_file_is_the_job_s(tmp_path, type):
    """And with it the memory: a capable processor computes BF16 files as they are, all others in float32."""
    folder = save_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=512)
    path = gguf_files.export(folder, tmp_path / "model.gguf", type)
    planned, found = of_job(path, tmp_path)
    assert found == planned


@pytest.mark.processor
def test_the_precision_of_a_job_on_a_quantized_folder_is_the_job_s(tmp_path, make):
    folder = save_model(tmp_path / "m", "llama", dtype="bfloat16", hidden_size=256, intermediate_size=512)
    save_tokenizer(folder)
    make("nf4", folder, "-o", tmp_path / "nf4")
    planned, found = of_job(tmp_path / "nf4", tmp_path)
    assert found == planned


def test_a_quantized_gguf_file(tmp_path):
    folder = save_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=512, dtype="float16")
    path = gguf_files.export(folder, tmp_path / "model.gguf", "Q8_0")
    whole, found = source.read(str(folder)), source.read(str(path))
    assert found.layout == "gguf"
    assert found.parameters.count == whole.parameters.count
    linear = next(tensor for tensor in found.parameters.linears if tensor.local.endswith("up_proj.weight"))
    assert linear.in_file == 512 * 256 * 34 // 32 and linear.nbytes == 2 * 512 * 256
    record = forecast.of_source(found, QUESTION)
    assert record["weights"]["stored"]["bytes"] == record["weights"]["Q8_0"]["bytes"]
    assert record["job"]["gptq"]["needs"] == "--allow-requantize"


def write_gguf(path, architecture: str, keys: dict, tensors: dict[str, tuple[int, ...]]):
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
    with writing(path, metadata, [Entry(name, "F16", shape) for name, shape in tensors.items()]) as write:
        for name, shape in tensors.items():
            write(name, [bytes(2 * torch.Size(shape).numel())])
    return path


KEYS = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "context_length": 256}
TENSORS = {"token_embd.weight": (512, 64)} | {
    f"blk.{block}.attn_{part}.weight": (width, 64)
    for block in range(2)
    for part, width in (("q", 64), ("k", 32), ("v", 32))
}


def test_other_architectures_are_known_by_their_projections_unless_something_is_unusual(tmp_path):
    plain = write_gguf(tmp_path / "a.gguf", "strange", KEYS, TENSORS)
    record = forecast.of_source(source.read(str(plain)), QUESTION)
    assert record["kv_cache"]["bytes_per_token"] == 2 * 2 * 64
    assert "no GGUF architecture" in record["weights"]["Q8_0"]["reason"]
    for key in ("ssm.conv_kernel", "attention.sliding_window", "attention.kv_lora_rank"):
        path = write_gguf(tmp_path / "b.gguf", "strange", KEYS | {key: 8}, TENSORS)
        cache = forecast.of_source(source.read(str(path)), QUESTION)["kv_cache"]
        assert cache["bytes_per_sequence"] is None and "not known" in cache["unsupported"]
    moe = write_gguf(
        tmp_path / "c.gguf",
        "qwen3moe",
        KEYS | {"attention.head_count_kv": 2, "expert_count": 4, "expert_used_count": 1},
        TENSORS | {f"blk.{block}.ffn_up_exps.weight": (4, 64, 64) for block in range(2)},
    )
    found = source.read(str(moe))
    assert found.settings.model_type == "qwen3_moe" and found.settings.kv_heads == 2
    assert found.parameters.active == found.parameters.count - 2 * 3 * 64 * 64


def test_experts_of_old_gguf_files_lie_one_by_one(tmp_path):
    experts = {f"blk.{b}.ffn_up.{k}.weight": (64, 64) for b in range(2) for k in range(4)}
    keys = KEYS | {"attention.head_count_kv": 2, "expert_count": 4, "expert_used_count": 2}
    found = source.read(str(write_gguf(tmp_path / "a.gguf", "llama", keys, TENSORS | experts)))
    assert found.parameters.active == found.parameters.count - 2 * 2 * 64 * 64
    assert forecast.of_source(found, QUESTION)["job"]["nf4"]["peak_memory_bytes"]


def test_a_gguf_file_that_is_no_model_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "llama", {}, {"token_embd.weight": (512, 64)})
    with pytest.raises(QuantkitError, match="holds no language model") as refused:
        source.read(str(path))
    assert refused.value.exit_code == 4


def test_headers_of_safetensors_are_entries_too():
    info = TensorInfo("model.layers.0.mlp.up_proj.weight", "BF16", (128, 64), source.Path("x"), 0, 16384)
    settings = source.Settings.of({"model_type": "llama", "num_hidden_layers": 1})
    (tensor,) = parameters.from_headers([info], settings).tensors
    assert tensor.in_file == tensor.nbytes == 16384 and tensor.stored_nbytes is None
