"""What transformers fills in where config.json leaves a number out, by model_type.

Published files do leave out much: Gemma 3 names no vocabulary, older Mistrals no key/value heads. Only what
does not follow from other numbers stands here (a family without `num_key_value_heads` has as many as heads).
Source: transformers' configuration classes; the tests compare every one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS, KV_HEADS, HEAD_DIM = "num_attention_heads", "num_key_value_heads", "head_dim"
VOCABULARY, CONTEXT, WINDOW = "vocab_size", "max_position_embeddings", "sliding_window"
# A number that a file says under one of these names is not filled in under another.
SYNONYMS = (
    (HEADS, "n_head", "n_heads"),
    (VOCABULARY, "padded_vocab_size"),
    (CONTEXT, "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    ("num_local_experts", "num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "experts_per_token"),
)


def _numbers(heads: int, vocabulary: int, context: int, **more: int) -> dict[str, int]:
    return {HEADS: heads, VOCABULARY: vocabulary, CONTEXT: context, **more}


def _experts(count: int, routed: int) -> dict[str, int]:
    return {"num_local_experts": count, "num_experts_per_tok": routed}


DEFAULTS: dict[str, dict[str, int]] = {
    "apertus": _numbers(32, 131072, 65536),
    "arcee": _numbers(32, 32000, 4096),
    "bamba": _numbers(32, 128000, 262144, num_key_value_heads=8),
    "bloom": {HEADS: 8, VOCABULARY: 250880},
    "codegen": _numbers(16, 50400, 2048),
    "cohere": _numbers(64, 256000, 8192),
    "cohere2": _numbers(64, 256000, 8192, sliding_window=4096),
    "deepseek_v2": _numbers(32, 102400, 2048, kv_lora_rank=512, qk_rope_head_dim=64),
    "deepseek_v3": _numbers(128, 129280, 4096, num_key_value_heads=128, kv_lora_rank=512, qk_rope_head_dim=64)
    | _experts(256, 8),
    "ernie4_5": _numbers(16, 103424, 131072, num_key_value_heads=2, head_dim=128),
    "falcon": _numbers(71, 65024, 2048),
    "falcon_h1": _numbers(32, 128000, 8192, num_key_value_heads=8),
    "gemma": _numbers(16, 256000, 8192, num_key_value_heads=16, head_dim=256),
    "gemma2": _numbers(8, 256000, 8192, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _numbers(8, 262208, 131072, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3n_text": _numbers(
        8, 262400, 32768, num_key_value_heads=2, head_dim=256, sliding_window=512, num_kv_shared_layers=15
    ),
    "glm": _numbers(32, 151552, 131072, num_key_value_heads=2, head_dim=128),
    "glm4": _numbers(32, 151552, 131072, num_key_value_heads=2, head_dim=128),
    "glm4_moe": _numbers(96, 151552, 131072, num_key_value_heads=8) | _experts(128, 8),
    "gpt2": _numbers(12, 50257, 1024),
    "gpt_bigcode": _numbers(12, 50257, 1024),
    "gpt_neox": _numbers(64, 50432, 2048),
    "gpt_oss": _numbers(64, 201088, 131072, num_key_value_heads=8, head_dim=64, sliding_window=128)
    | _experts(128, 4),
    "gptj": _numbers(16, 50400, 2048),
    "granite": _numbers(32, 32000, 2048),
    "granitemoe": _numbers(32, 32000, 2048) | _experts(8, 2),
    "granitemoehybrid": _numbers(32, 32000, 2048) | _experts(8, 2),
    "helium": _numbers(20, 48000, 4096, num_key_value_heads=20, head_dim=128),
    "hunyuan_v1_dense": _numbers(32, 290943, 2048),
    "jamba": _numbers(32, 65536, 262144, num_key_value_heads=8) | _experts(16, 2),
    "lfm2": _numbers(32, 65536, 128000, num_key_value_heads=8),
    "llama": _numbers(32, 32000, 2048),
    "llama4_text": _numbers(
        40, 202048, 131072, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192
    )
    | _experts(16, 1),
    "minimax_m2": _numbers(48, 200064, 196608, num_key_value_heads=8, head_dim=128) | _experts(256, 8),
    "ministral": _numbers(32, 32000, 131072, num_key_value_heads=8, sliding_window=4096),
    "mistral": _numbers(32, 32000, 131072, num_key_value_heads=8, sliding_window=4096),
    "mixtral": _numbers(32, 32000, 131072, num_key_value_heads=8) | _experts(8, 2),
    "mpt": _numbers(16, 50368, 2048),
    "nemotron": _numbers(48, 256000, 4096),
    "nemotron_h": _numbers(32, 131072, 4096, num_key_value_heads=8, head_dim=128) | _experts(8, 2),
    "olmo": _numbers(32, 50304, 2048),
    "olmo2": _numbers(32, 50304, 2048),
    "olmo3": _numbers(32, 50304, 2048, sliding_window=4096),
    "olmoe": _numbers(16, 50304, 4096) | _experts(64, 8),
    "opt": _numbers(12, 50272, 2048),
    "persimmon": _numbers(64, 262144, 16384),
    "phi": _numbers(32, 51200, 2048),
    "phi3": _numbers(32, 32064, 4096),
    "phimoe": _numbers(32, 32064, 131072, num_key_value_heads=8) | _experts(16, 2),
    "qwen2": _numbers(32, 151936, 32768, num_key_value_heads=32),
    "qwen2_moe": _numbers(16, 151936, 32768, num_key_value_heads=16) | _experts(60, 4),
    "qwen3": _numbers(32, 151936, 32768, num_key_value_heads=32, head_dim=128),
    "qwen3_moe": _numbers(32, 151936, 32768, num_key_value_heads=4) | _experts(128, 8),
    "qwen3_next": _numbers(
        16,
        151936,
        32768,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    | _experts(512, 10),
    "seed_oss": _numbers(80, 155136, 524288, num_key_value_heads=8, head_dim=128),
    "smollm3": _numbers(16, 128256, 32768, num_key_value_heads=4),
    "stablelm": _numbers(32, 50304, 4096, num_key_value_heads=32),
    "starcoder2": _numbers(24, 49152, 4096, num_key_value_heads=2),
}


def fill(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with what config.json left out; what it says is null stays so."""
    absent = {
        key: value
        for key, value in DEFAULTS.get(values["model_type"], {}).items()
        if not any(name in values for group in SYNONYMS if key in group for name in group)
    }
    return absent | dict(values)
