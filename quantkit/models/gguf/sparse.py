"""Architectures of llama.cpp that are mixtures of experts: one row each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import name_all
from quantkit.models.gguf.architecture import (
    BIASES,
    GATE,
    GRANITE,
    LLAMA_SCALINGS,
    RMS,
    ROTARY,
    SHARED_LENGTH,
    SWIGLU,
    SWIGLU_NO_BIAS,
    Architecture,
    Fields,
    _grouped_heads,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _ernie(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Shared experts are one matrix; all blocks behind the first dense ones may have experts."""
    shared, width = keys.get(SHARED_LENGTH, 0), keys.get("expert_feed_forward_length")
    if type(shared) is not int or type(width) is not int or width < 1:
        return {}
    return {"moe_num_shared_experts": shared // width, "moe_layer_end_index": -1}


def _latent(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What the sizes of multi-head latent attention say."""
    rotated = keys.get("rope.dimension_count", 0)
    return {
        "num_key_value_heads": keys.get("attention.head_count"),
        "head_dim": rotated,
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.get("attention.key_length_mla", 0) - rotated,
    }


def _without_query_rank(config: PretrainedConfig) -> str | None:
    """Its loader takes models of that depth for DeepSeek-V2-Lite."""
    lite = config.num_hidden_layers in (26, 27) and config.q_lora_rank
    return f"q_lora_rank {config.q_lora_rank} in {config.num_hidden_layers} blocks" if lite else None


def _grouped_experts(config: PretrainedConfig) -> str | None:
    """Its loader stops where all groups are used."""
    groups = config.n_group, config.topk_group
    return None if groups == (1, 1) or groups[0] > groups[1] else "n_group {}, topk_group {}".format(*groups)


def _other_blocks(config: PretrainedConfig) -> str | None:
    """Which blocks know positions, have experts and norms is not told: every fourth, every nth, and all but
    those of the largest model."""
    blocks, step = config.num_hidden_layers, config.interleave_moe_layer_step
    rotated = [int(index % 4 != 3) for index in range(blocks)]
    kinds = ["chunked_attention" if rotates else "full_attention" for rotates in rotated]
    usual = {
        "no_rope_layers": rotated,
        "layer_types": kinds,
        "moe_layers": list(range(step - 1, blocks, step)),
        "use_qk_norm": config.num_local_experts != UNNORMED,
    }
    odd = [f"{name} {getattr(config, name)}" for name in usual if getattr(config, name) != usual[name]]
    odd += [f"{blocks} blocks (it stops where none is without positions)"] if blocks < 4 else []
    return name_all(odd) if odd else None


def _dense_at_the_end(config: PretrainedConfig) -> str | None:
    last = config.moe_layer_end_index
    return f"moe_layer_end_index {last}" if 0 <= last < config.num_hidden_layers - 1 else None


EXPERTS: Fields = RMS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
WIDTH: Fields = {"expert_feed_forward_length": "moe_intermediate_size"}
DEEP: Fields = (  # as in DeepSeek 3: the first blocks dense, shared experts beside those that are chosen
    EXPERTS
    | WIDTH
    | {
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "leading_dense_block_count": "first_k_dense_replace",
    }
)
LATENT: Fields = DEEP | {
    "attention.key_length": None,
    "attention.value_length": None,
    "attention.head_count_kv": None,
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
}
LATENT_KEYS: Mapping[str, Callable[[PretrainedConfig], int]] = {  # of a token's vector, whatever the heads
    "attention.key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "attention.value_length": lambda config: config.kv_lora_rank,
    "attention.head_count_kv": lambda config: 1,
    "attention.key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    "attention.q_lora_rank": lambda config: config.q_lora_rank or 0,
}
ONE_GROUP: Mapping[str, tuple] = {"n_group": (1,), "topk_group": (1,)}
SOFTMAX, SIGMOID = 1, 2  # of llama.cpp's gating functions
LATENT_FIXED = SWIGLU_NO_BIAS | {"rms_norm_eps": (1e-6,)}  # as that of the norms inside attention
ALL_SPARSE: Mapping[str, tuple] = {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)}

LOCAL: Fields = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}

UNNORMED = 128  # experts of Llama 4 Maverick: llama.cpp norms no queries of a model with so many
# Whose graph in llama.cpp computes something else, whatever the configuration says.
UNLIKE = {"phimoe": "its norms as RMS norms and its router as a plain softmax"}

SPARSE = (
    Architecture(
        "llama",
        ("mixtral",),
        EXPERTS,
        fixed=SWIGLU,
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture(
        "qwen2moe",
        ("qwen2_moe",),
        EXPERTS | WIDTH | {SHARED_LENGTH: "shared_expert_intermediate_size"},
        fixed=SWIGLU | ALL_SPARSE | {"norm_topk_prob": (False,)},
        flags={"qkv_bias": "blk.0.attn_q.bias"},
    ),
    Architecture(
        "qwen3moe",
        ("qwen3_moe",),
        EXPERTS | WIDTH,
        fixed=SWIGLU_NO_BIAS | ALL_SPARSE | {"norm_topk_prob": (True,)},
        free_head_dim=True,
        restore=lambda keys, names: {"norm_topk_prob": True},
    ),
    Architecture(
        "olmoe",
        ("olmoe",),
        EXPERTS,
        fixed=SWIGLU_NO_BIAS | {"norm_topk_prob": (False,), "clip_qkv": (None,)},
        head="always",
        refuse=_grouped_heads,
    ),
    Architecture(
        "ernie4_5-moe",
        ("ernie4_5_moe",),
        EXPERTS
        | WIDTH
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            SHARED_LENGTH: None,
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        fixed=SWIGLU | {"use_bias": (False,)},
        refuse=_dense_at_the_end,
        restore=_ernie,
    ),
    Architecture(
        "dots1",
        ("dots1",),
        DEEP,
        fixed=SWIGLU_NO_BIAS | ONE_GROUP,
        constants={GATE: SIGMOID},
        free_head_dim=True,
        head="always",
        refuse=_grouped_heads,
    ),
    Architecture(
        "minimax-m2",
        ("minimax_m2",),
        EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        fixed=SWIGLU,
        constants={GATE: SIGMOID},
        partial_rotary=True,
        free_head_dim=True,
        head="always",
    ),
    Architecture(
        "glm4moe",
        ("glm4_moe",),
        DEEP,
        fixed=SWIGLU | ONE_GROUP,
        flags=BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        constants={GATE: SIGMOID},
        partial_rotary=True,
        free_head_dim=True,
    ),
    Architecture(
        "granitemoe",
        ("granitemoe",),
        GRANITE | LOCAL,
        fixed=SWIGLU,
        flags=BIASES,
        rows=ROTARY,
        rope=LLAMA_SCALINGS,
        free_head_dim=True,
    ),
    Architecture(
        "deepseek2",
        ("deepseek_v2",),
        LATENT,
        fixed=LATENT_FIXED | {"mlp_bias": (False,), "norm_topk_prob": (False,), "topk_method": ("greedy",)},
        constants={GATE: SOFTMAX},
        rope=("yarn",),
        free_head_dim=True,
        computed=LATENT_KEYS,
        splits={"attn_kv_b": "latent"},
        latent=True,
        refuse=_without_query_rank,
        restore=_latent,
    ),
    Architecture(
        "deepseek2",
        ("deepseek_v3",),
        LATENT | {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
        fixed=LATENT_FIXED | {"rope_interleave": (True,)},
        constants={GATE: SIGMOID},
        rope=("yarn",),
        free_head_dim=True,
        computed=LATENT_KEYS,
        splits={"attn_kv_b": "latent"},
        latent=True,
        refuse=_grouped_experts,
        restore=_latent,
    ),
    Architecture(
        "gpt-oss",
        ("gpt_oss",),
        RMS
        | LOCAL
        | {
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        fixed=SWIGLU | {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        rope=("yarn",),
        free_head_dim=True,
        window=2,
        head="always",
        truncate=False,
    ),
    Architecture(
        "llama4",
        ("llama4_text",),
        RMS
        | LOCAL
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        fixed=SWIGLU_NO_BIAS
        | {
            "attention_chunk_size": (8192,),
            "attn_temperature_tuning": (True,),
            "floor_scale": (8192,),
            "attn_scale": (0.1,),
        },
        rope=("linear", "llama3"),
        free_head_dim=True,
        refuse=_other_blocks,
        restore=lambda keys, names: {"use_qk_norm": keys.get("expert_count") != UNNORMED},
    ),
)
