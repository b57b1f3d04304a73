"""Every architecture: llama.cpp computes from the file what transformers computes, and so do we."""

import blocks
import families
import gguf_files
import numpy as np
import pytest
import test_gguf_mixtures_of_experts as mixtures
import torch
import transformers as hf
from nights import by_day
from sums import assert_sums

from quantkit.inspection import record
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.headers import open_contents
from quantkit.models.files.open import open_checkpoint

pytest.importorskip("xllamacpp")
from llama_cpp import Llama  # noqa: E402

LONG = [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0]
SHORT = [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.7]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500000.0,
}
LONGROPE = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT}
PHI3_LONG = {"original_max_position_embeddings": 256, "max_position_embeddings": 1024}
GEMMA = {"query_pre_attn_scalar": 16}  # equal to head_dim, as in the models of this family
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
}
HALF_BY_SECTIONS = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
CASES = {  # name -> (family, what its configuration has beside the usual)
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama 3 elsewhere": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "llama longrope": (
        "llama",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 256, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "gemma3 usual pattern": (
        "gemma3",
        GEMMA | {"num_hidden_layers": 7, "layer_types": None, "final_logit_softcapping": 20.0},
    ),
    "gemma3 scaled": ("gemma3", GEMMA | {"rope_parameters": GEMMA3_ROPE}),
    "phi3": ("phi3", {}),
    "phi3 partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3 short": ("phi3", {"rope_parameters": LONGROPE} | PHI3_LONG),
    "phi3 long": ("phi3", {"rope_parameters": LONGROPE} | PHI3_LONG),
    "gpt2": ("gpt2", {}),
    "gpt2 inner": ("gpt2", {"n_inner": 96}),
    "gptneox": ("gpt_neox", {}),
    "gptneox tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "gptneox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "bloom": ("bloom", {}),
    "falcon 7b": ("falcon", {}),
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon heads": ("falcon", {"multi_query": False}),
    "starcoder": ("gpt_bigcode", {}),
    "starcoder heads": ("gpt_bigcode", {"multi_query": False}),
    "starcoder2": ("starcoder2", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite everything": (
        "granite",
        MULTIPLIERS | {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "granite scaled": ("granite", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "glm": ("glm", {}),
    "glm tied": ("glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4 tied": ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "exaone4 deep": (  # sliding windows, and no rotary embeddings between
        "exaone4",
        {
            "num_hidden_layers": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "sliding_window": 16,
            "layer_types": None,
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 untied": ("smollm3", {"tie_word_embeddings": False, "rope_parameters": YARN}),
    "nemotron": ("nemotron", {}),
    "nemotron biases": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3.5": ("qwen3_5", {"rope_parameters": HALF_BY_SECTIONS}),
    "qwen3.5 tied": (
        "qwen3_5",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "stablelm": ("stablelm", {}),
    "stablelm 12b": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere plus": (
        "cohere",
        {
            "use_qk_norm": True,
            "logit_scale": 1.0,
            "num_hidden_layers": 64,
            "hidden_size": 16,
            "intermediate_size": 16,
        },
    ),
}
LENGTHS = {"phi3 long": 300}  # beyond the original context
GELU_ERROR = 2e-3  # llama.cpp looks GELU up in a table of float16
EXACT = 1e-5


def has_gelu(config) -> bool:
    """Bloom's GELU has no field of its own."""
    fields = ("hidden_act", "hidden_activation", "activation", "activation_function")
    return any(
        "gelu" in str(getattr(config, name, "gelu" if config.model_type == "bloom" else ""))
        for name in fields
    )


# One of each family, and each way to scale positions.
# One of each way to lay tensors, rotate positions, attend or route; the others are made of the same parts.
DAY = "llama,llama yarn,llama longrope,qwen3,gemma3,phi3,gpt2,bloom,falcon 40b,glm4,mixtral,qwen2moe"
DAY += ",deepseek-v3,gpt-oss,llama4,granitemoe"


@pytest.fixture(scope="module", params=by_day([*CASES, *mixtures.CASES], DAY.split(",")))
def case(request, tmp_path_factory):
    """File, ids, transformers' logits and configuration of each case."""
    folder = tmp_path_factory.mktemp("case") / "model"
    if request.param in CASES:
        family, changes = CASES[request.param]
        families.save_model(folder, family, **changes)
    else:
        mixtures.save(folder, *mixtures.CASES[request.param])
    path = gguf_files.export(folder, folder.with_suffix(".gguf"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (1, LENGTHS.get(request.param, 40)), generator=generator)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return path, ids, model(ids).logits[0], model.config


def test_llama_cpp_computes_the_same(case):
    path, ids, expected, config = case
    with Llama(path, 512 if ids.shape[1] > 256 else 256) as llama:
        difference = np.abs(llama.logits(ids[0].tolist()) - expected.numpy()).max()
    assert difference <= (GELU_ERROR if has_gelu(config) else EXACT)
    assert expected.abs().max() > 0.1


def test_the_file_read_back_computes_the_same(case):
    path, ids, expected, _ = case
    assert not open_checkpoint(str(path)).quantized
    assert_sums(blocks.logits(path, ids), expected, 1e-5)


def test_inspect_knows_what_transformers_makes_of_the_file(case):
    """Yes: it computes the same; no: it refuses, or computes something else; untold: that depends."""
    path, ids, expected, _ = case
    rows = record.describe(open_contents(str(path)))["clients"]
    told = {row["client"]: row["loads"] for row in rows}
    loads = told["transformers"]
    assert told["llama.cpp"] is True
    if loads is None:
        assert not any("_exps." in name for name in read_header(path)[1])  # of mixtures all is known
        return
    try:
        model = hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (ValueError, AssertionError, RuntimeError, TypeError):  # not supported yet; its own mistakes
        assert not loads
        return
    with torch.no_grad():
        difference = (model(ids).logits[0] - expected).abs().max()
    assert loads == (difference <= EXACT)


def test_a_file_written_from_the_file_is_the_same(case, tmp_path):
    """Metadata, order and bytes: what was undone in reading is done again in writing."""
    path, *_ = case
    again = gguf_files.export(path, tmp_path / path.name)
    (metadata, infos), (expected, places) = read_header(again), read_header(path)
    assert metadata == expected and list(infos) == list(places)
    stored = open_checkpoint(str(path)).infos.values()
    targets = {info.target.name: info.target for info in stored}
    for name, info in infos.items():
        found, wanted = (
            np.fromfile(i.file, "<f4", i.nbytes // 4, offset=i.offset) for i in (info, places[name])
        )
        rounded = 0.0
        if name in targets and targets[name].changed:  # w + 1 - 1 rounds, and so does exp(log w)
            rounded = 1.2e-7 if targets[name].shift else 4e-7 * np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= rounded, name
    if not any(target.changed for target in targets.values()):
        assert again.read_bytes() == path.read_bytes()
