"""Checkpoints on their way to GGUF: order and types of tensors, what is dropped, refused and told."""

import gguf
import gguf_files
import jobs
import pytest
import torch
from jobs import error_of
from safetensors.torch import load_file, save_file

from quantkit.errors import UNSUPPORTED
from quantkit.models.files.gguf_file import read_header
from quantkit.models.files.open import open_checkpoint
from quantkit.models.gguf import configuration, metadata, tensors
from quantkit.models.gguf.architectures import TABLE
from quantkit.models.gguf.mixtures import stays_float


def test_llama_quantize_s_order(tiny_model):
    names = [
        t.name for t in tensors.of_checkpoint(open_checkpoint(str(tiny_model("llama", num_hidden_layers=11))))
    ]
    leaves = "attn_k attn_norm attn_output attn_q attn_v ffn_down ffn_gate ffn_norm ffn_up".split()
    blocks = [f"blk.{index}.{leaf}.weight" for index in range(11) for leaf in leaves]
    assert names == ["output.weight", "output_norm.weight", "token_embd.weight", *blocks]


def q4_0(rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q4_0))


def test_what_stays_in_float32(tiny_model):
    """One-dimensional tensors, norms of whatever shape, positions; all else may be quantized."""
    found = tensors.of_checkpoint(open_checkpoint(str(tiny_model("gpt2"))))
    matrices = {target.name for target in found if not stays_float(target.name, target.shape)}
    leaves = ("attn_output", "attn_qkv", "ffn_down", "ffn_up")
    blocks = {f"blk.{index}.{leaf}.weight" for index in range(3) for leaf in leaves}
    assert matrices == blocks | {"token_embd.weight"}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon", "bloom", "gpt_bigcode", "granite"])
def test_encoded_rows_change_places_as_values_do(tiny_model, family):
    """Blocks run along the rows: permuting before encoding or after makes no difference."""
    changes = {"multi_query": False} if family in ("falcon", "gpt_bigcode") else {}
    checkpoint = open_checkpoint(str(tiny_model(family, **changes)))
    moved = [target for target in tensors.of_checkpoint(checkpoint) if target.index is not None]
    assert moved
    for target in moved:
        values = target.read(checkpoint)
        assert not torch.equal(target.to_gguf(values), values)
        assert torch.equal(target.to_hf(target.to_gguf(values)), values)
        if values.ndim == 2:
            assert torch.equal(target.to_gguf(q4_0(values)), q4_0(target.to_gguf(values)))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_names_without_prefix_and_stale_buffers(tiny_model, family):
    """Older checkpoints lack the base model's prefix and hold buffers that are computed nowadays."""
    plain = tiny_model(family)
    older = tiny_model(family, name="older")
    stored = load_file(older / "model.safetensors")
    prefix = "model." if family == "llama" else "transformer."
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    stale = {
        "gpt2": "h.0.attn.bias",
        "llama": "layers.0.self_attn.rotary_emb.inv_freq",
        "bloom": "h.0.attn.masked_bias",
    }
    save_file(stored | {stale[family]: torch.ones(4)}, older / "model.safetensors", metadata={"format": "pt"})
    files = [gguf_files.export(folder, folder.with_suffix(".gguf")) for folder in (plain, older)]
    (keys, infos), (others, places) = map(read_header, files)
    assert keys | {"general.name": "older"} == others
    assert [i.name for i in infos.values()] == [i.name for i in places.values()]
    found = [
        file.read_bytes()[min(i.offset for i in of.values()) :]
        for file, of in zip(files, (infos, places), strict=True)
    ]
    assert found[0] == found[1]


def test_tensors_the_model_does_not_have_are_refused_by_name(tiny_model):
    folder = tiny_model("llama")
    with jobs.edited(folder) as stored:
        stored["model.layers.0.self_attn.sinks"] = torch.ones(4)
    error = error_of(tensors.of_checkpoint, open_checkpoint(str(folder)))
    assert error.exit_code == UNSUPPORTED and "model.layers.0.self_attn.sinks" in error.message


def test_missing_tensors_are_named(tiny_model):
    folder = tiny_model("qwen2")
    with jobs.edited(folder) as stored:
        del stored["model.layers.1.self_attn.k_proj.bias"]
    error = error_of(tensors.of_checkpoint, open_checkpoint(str(folder)))
    assert "model.layers.1.self_attn.k_proj.bias" in error.message


@pytest.mark.parametrize("unlike", [False, True])
def test_a_stored_head_is_written_when_it_is_not_the_embedding(tiny_model, unlike):
    folder = tiny_model("llama", tie_word_embeddings=True)
    with jobs.edited(folder) as stored:
        stored["lm_head.weight"] = head = stored["model.embed_tokens.weight"].clone() + unlike
    found = {target.name: target for target in tensors.of_checkpoint(open_checkpoint(str(folder)))}
    assert ("output.weight" in found) == unlike
    if unlike:
        assert torch.equal(found["output.weight"].read(open_checkpoint(str(folder))), head)


REFUSED = {  # (family, configuration) -> what llama.cpp does not know
    "no row": ("opt", {}, "GGUF of opt is not supported"),
    "activation": ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    "two at once": ("falcon", {"alibi": True, "bias": True}, "alibi True, bias True"),
    "attention's scale": ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256 (only 16)"),
    "no capping": ("gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None}, "soft-capping"),
    "own head": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": False}, "lm_head.weight"),
    "pattern": (
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
        "sliding attention other than in all but every nth block",
    ),
    "heads": ("qwen2", {"head_dim": 32}, "head_dim 32 with 4 heads of 64"),
    "norms by depth": ("cohere", {"use_qk_norm": True}, "use_qk_norm True at this depth"),
    "heads of another width": ("glm", {"head_dim": 32}, "head_dim 32"),
    "windows by depth": ("exaone4", {"sliding_window": 16}, "sliding_window 16 at this depth"),
    "rotary blocks": ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, "no_rope_layers other than"),
    "another activation": ("nemotron", {"hidden_act": "silu"}, "hidden_act 'silu'"),
    "value heads": ("qwen3_5", {"linear_num_value_heads": 8}, "8 value heads over 4 key heads"),
    "wider value heads": ("qwen3_5", {"linear_value_head_dim": 32}, "value heads of 32 over key heads of 16"),
    "no state": ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "all but every nth block"),
    "sections": (
        "qwen3_5",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                             "mrope_section": [4, 2, 2]}},
        "mrope_section [4, 2, 2] for 8 angles",
    ),
    "scaling": (
        "qwen2",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        "rotary embeddings scaled by 'llama3'",
    ),
    "yarn's bounds": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 2.0}},
        "yarn with beta_slow 2.0",
    ),
    "factors": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0],
                             "short_factor": [1.0] * 8}},
        "longrope with 1 numbers as long_factor",
    ),
    "partly rotated": (
        "starcoder2",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rotating 0.5 of each head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(tiny_model, case):
    family, changes, why = REFUSED[case]
    folder = tiny_model(family)
    jobs.configure(folder, **changes)
    checkpoint = open_checkpoint(str(folder))

    def plan():
        return configuration.to_metadata(checkpoint.config), tensors.of_checkpoint(checkpoint)

    error = error_of(plan)
    assert error.exit_code == UNSUPPORTED and why in error.message
    if case == "no row":
        assert all(kind in error.hint for row in TABLE for kind in row.model_types)


def test_what_llama_cpp_leaves_out_is_told(tiny_model):
    def notes(family, **changes):
        return configuration.notes(open_checkpoint(str(tiny_model(family, **changes))).config)

    assert notes("mistral") == ["llama.cpp attends beyond the sliding window of 16 tokens"]
    assert notes("mistral", sliding_window=None) == notes("gemma2") == notes("qwen3") == notes("gpt2") == []
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert "beyond 256 tokens" in notes("llama", rope_parameters=dynamic)[0]


def test_general_metadata(tiny_model):
    folder = tiny_model("llama", name="Tiny-Llama")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    checkpoint = open_checkpoint(str(folder))
    targets = tensors.of_checkpoint(checkpoint)
    keys = metadata.assemble(checkpoint, targets, "Q4_K_M", {"tokenizer.ggml.model": "gpt2"})
    assert list(keys)[0] == "general.architecture" and list(keys)[-1] == "general.file_type"
    assert keys["general.name"] == "Tiny-Llama" and keys["general.license"] == "apache-2.0"
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_M == 15
    assert keys["general.quantization_version"] == 2 and keys["general.type"] == "model"
    weights = sum(parameter.numel() for parameter in load_file(folder / "model.safetensors").values())
    assert keys["general.size_label"] == f"{round(weights / 1000)}K"


def test_a_name_like_phi_3_stays_only_with_phi_3_s_tokens(tiny_model):
    """llama.cpp looks for certain tokens in a model of that name and throws where they are absent."""
    checkpoint = open_checkpoint(str(tiny_model("phi3", name="my-Phi-3-mini")))
    targets = tensors.of_checkpoint(checkpoint)
    for tokens, name in ((["a"], "my-Phi_3-mini"), (["<s>", "<unk>", "<|endoftext|>"], "my-Phi-3-mini")):
        keys = metadata.assemble(checkpoint, targets, "F16", {"tokenizer.ggml.tokens": tokens})
        assert keys["general.name"] == name
