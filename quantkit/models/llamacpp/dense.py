"""Architectures of llama.cpp without experts: one row each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.models.llamacpp.architecture import (
    BIASES,
    COMMON,
    DEFAULTS,
    EPSILON,
    GELU,
    GPT2,
    GRANITE,
    GROUPED,
    LLAMA_SCALINGS,
    MULTI_HEAD,
    RMS,
    ROPE_SECTIONS,
    ROTARY,
    SWIGLU,
    SWIGLU_NO_BIAS,
    Architecture,
    Fields,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _falcon(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The oldest form has one key/value head; the newer one says how many, and may have a second norm."""
    kv_heads = _kv_heads(keys)
    two_norms = "blk.0.attn_norm_2.weight" in names
    if kv_heads == 1 and not two_norms:
        return {"multi_query": True}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }


def _kv_heads(keys: Mapping[str, Any]) -> int:
    """Of a file."""
    return keys.get("attention.head_count_kv", keys.get("attention.head_count"))


def _without_capping(config: PretrainedConfig) -> str | None:
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    return "scores and logits without soft-capping" if None in caps else None


def _norms_by_depth(config: PretrainedConfig) -> str | None:
    """Its loader looks for norms of queries and keys in the models of 64 blocks and more, and only there."""
    expected = config.num_hidden_layers >= 64
    return None if config.use_qk_norm == expected else f"use_qk_norm {config.use_qk_norm} at this depth"


def _heads_of_other_width(config: PretrainedConfig) -> str | None:
    heads = config.num_attention_heads
    return f"head_dim {config.head_dim}" if config.head_dim * heads != config.hidden_size else None


def _rope_by_depth(config: PretrainedConfig) -> str | None:
    """It has sliding windows, and no rotary embeddings between them, at one depth alone."""
    given = config.sliding_window
    return f"sliding_window {given} at this depth" if given and config.num_hidden_layers != 64 else None


def _delta_net(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Width of a value head, and which blocks attend."""
    inner, heads = keys.get("ssm.inner_size"), keys.get("ssm.time_step_rank")
    period, blocks = keys.get("full_attention_interval", 4), keys.get("block_count")
    sizes = inner, heads, period, blocks
    if any(type(size) is not int or size < 1 for size in sizes) or blocks > len(names):
        return {}
    return {"linear_value_head_dim": inner // heads, "layer_types": _attending(period, blocks)}


def _attending(period: int, blocks: int) -> list[str]:
    return ["linear_attention" if (index + 1) % period else "full_attention" for index in range(blocks)]


def _unlike_delta_net(config: PretrainedConfig) -> str | None:
    """It repeats keys in another order, for which columns of the output projection change places: blocks of
    256 codes cannot. Angles in no section are those of position 0 there."""
    if config.linear_num_value_heads != config.linear_num_key_heads:
        return f"{config.linear_num_value_heads} value heads over {config.linear_num_key_heads} key heads"
    if config.linear_value_head_dim != config.linear_key_head_dim:
        return f"value heads of {config.linear_value_head_dim} over key heads of {config.linear_key_head_dim}"
    kinds, rope = config.layer_types, config.rope_parameters
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if period < 2 or kinds != _attending(period, len(kinds)):
        return "linear attention other than in all but every nth block"
    sections, angles = DEFAULTS[ROPE_SECTIONS](config), config.head_dim * rope["partial_rotary_factor"] / 2
    whole = all(angle < 3 * sections[angle % 3] for angle in range(int(angles)))
    return None if whole else f"mrope_section {sections[:3]} for {angles:g} angles"


def _rope_in_three_of_four(config: PretrainedConfig) -> str | None:
    rotary = [bool(rope) for rope in config.no_rope_layers[: config.num_hidden_layers]]
    usual = [index % 4 != 3 for index in range(config.num_hidden_layers)]
    return None if rotary == usual else "no_rope_layers other than every fourth"


GPT2_FIXED: Mapping[str, tuple] = {
    "activation_function": GELU,
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
}
GEMMA: Fields = RMS | {
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
GEMMA_FIXED: Mapping[str, tuple] = {
    "hidden_activation": GELU,
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}

DENSE = (
    Architecture(
        "llama",
        ("llama", "mistral"),
        RMS,
        fixed=SWIGLU,
        flags=BIASES | {"mlp_bias": "blk.0.ffn_up.bias"},
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture("qwen2", ("qwen2",), RMS, fixed=SWIGLU),
    Architecture("qwen3", ("qwen3",), RMS, fixed=SWIGLU_NO_BIAS, free_head_dim=True),
    Architecture(
        "gemma2",
        ("gemma2",),
        RMS | {"attn_logit_softcapping": "attn_logit_softcapping"} | GEMMA,
        fixed=GEMMA_FIXED,
        norm_shift=1.0,
        free_head_dim=True,
        window=2,
        wide_blocks=46,
        head="never",
        refuse=_without_capping,
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        GEMMA,
        fixed=GEMMA_FIXED | {"attn_logit_softcapping": (None,)},
        norm_shift=1.0,
        rope=("linear",),
        free_head_dim=True,
        window=6,
        wide_blocks=62,
    ),
    Architecture(
        "phi3",
        ("phi3",),
        RMS
        | {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        fixed=SWIGLU,
        rope=("longrope",),
        partial_rotary=True,
    ),
    Architecture(
        "gpt2",
        ("gpt2",),
        GPT2,
        fixed=GPT2_FIXED | {"scale_attn_by_inverse_layer_idx": (False,)},
        rope=None,
    ),
    Architecture(
        "gptneox",
        ("gpt_neox",),
        COMMON
        | {
            "attention.head_count_kv": None,
            EPSILON: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        fixed={"hidden_act": GELU, "attention_bias": (True,)},
        rows=GROUPED,
        partial_rotary=True,
        head="always",
    ),
    Architecture(
        "bloom",
        ("bloom",),
        MULTI_HEAD | {"context_length": "seq_length", "feed_forward_length": None},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        rows=GROUPED,
        rope=None,
    ),
    Architecture(
        "falcon",
        ("falcon",),
        MULTI_HEAD | {"feed_forward_length": "ffn_hidden_size"},
        fixed={"activation": GELU, "alibi": (False,), "bias": (False,), "parallel_attn": (True,)},
        rows=GROUPED,
        constants={"tensor_data_layout": "jploski"},
        restore=_falcon,
    ),
    Architecture(
        "starcoder",
        ("gpt_bigcode",),
        GPT2,
        fixed=GPT2_FIXED,
        rows=GROUPED,
        rope=None,
        restore=lambda keys, names: {"multi_query": _kv_heads(keys) == 1},
    ),
    Architecture(
        "starcoder2",
        ("starcoder2",),
        COMMON | {EPSILON: "norm_epsilon"},
        fixed={"hidden_act": GELU, "use_bias": (True,)},
    ),
    Architecture("olmo2", ("olmo2",), RMS, fixed=SWIGLU_NO_BIAS, head="always"),
    Architecture(
        "granite",
        ("granite",),
        GRANITE,
        fixed=SWIGLU,
        flags=BIASES | {"mlp_bias": "blk.0.ffn_up.bias"},
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture(
        "stablelm",
        ("stablelm",),
        COMMON | {EPSILON: "layer_norm_eps"},
        fixed=SWIGLU,
        flags={
            "use_qkv_bias": "blk.0.attn_q.bias",
            "qk_layernorm": "blk.0.attn_q_norm.weight",
            "use_parallel_residual": "not blk.0.ffn_norm.weight",
        },
        partial_rotary=True,
        head="always",
    ),
    Architecture(
        "command-r",
        ("cohere",),
        COMMON
        | {
            "context_length": ("model_max_length", "max_position_embeddings"),
            EPSILON: "layer_norm_eps",
            "logit_scale": "logit_scale",
        },
        fixed=SWIGLU_NO_BIAS,
        flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
        head="never",
        refuse=_norms_by_depth,
    ),
    Architecture(
        "chatglm",
        ("glm",),
        RMS,
        fixed=SWIGLU,
        flags=BIASES,
        partial_rotary=True,
        free_head_dim=True,  # the configuration has a width of its own
        head="always",
        refuse=_heads_of_other_width,
    ),
    Architecture(
        "glm4",
        ("glm4",),
        RMS,
        fixed=SWIGLU,
        flags=BIASES,
        partial_rotary=True,
        free_head_dim=True,
        head="always",
    ),
    Architecture(
        "exaone4",
        ("exaone4",),
        RMS | {"attention.sliding_window": "sliding_window"},
        fixed=SWIGLU,
        rope=LLAMA_SCALINGS,
        window=4,
        window_depth=64,
        refuse=_rope_by_depth,
    ),
    Architecture(
        "smollm3",
        ("smollm3",),
        RMS,
        fixed=SWIGLU_NO_BIAS | {"mlp_bias": (False,), "use_sliding_window": (False,)},
        rows=ROTARY,
        refuse=_rope_in_three_of_four,
    ),
    Architecture(
        "nemotron",
        ("nemotron",),
        COMMON | {EPSILON: "norm_eps"},
        fixed={"hidden_act": ("relu2",)},
        flags=BIASES | {"mlp_bias": "blk.0.ffn_up.bias"},
        norm_shift=1.0,
        partial_rotary=True,
        head="always",
    ),
    Architecture(
        "qwen35",
        ("qwen3_5_text",),
        RMS
        | {
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
            "ssm.inner_size": None,
            "full_attention_interval": None,
            ROPE_SECTIONS: None,
        },
        fixed=SWIGLU_NO_BIAS,
        norm_shift=1.0,
        rope=(),
        partial_rotary=True,
        free_head_dim=True,
        refuse=_unlike_delta_net,
        restore=_delta_net,
    ),
)
