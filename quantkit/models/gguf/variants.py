"""Variants of dense architectures: which of them llama.cpp does not compute, and what a file says of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.models.gguf.architecture import DEFAULTS, ROPE_SECTIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def falcon(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The oldest form has one key/value head; the newer one says how many, and may have a second norm."""
    heads = kv_heads(keys)
    two_norms = "blk.0.attn_norm_2.weight" in names
    if heads == 1 and not two_norms:
        return {"multi_query": True}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": heads,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }


def kv_heads(keys: Mapping[str, Any]) -> int:
    """Of a file."""
    return keys.get("attention.head_count_kv", keys.get("attention.head_count"))


def without_capping(config: PretrainedConfig) -> str | None:
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    return "scores and logits without soft-capping" if None in caps else None


def norms_by_depth(config: PretrainedConfig) -> str | None:
    """Its loader looks for norms of queries and keys in the models of 64 blocks and more, and only there."""
    expected = config.num_hidden_layers >= 64
    return None if config.use_qk_norm == expected else f"use_qk_norm {config.use_qk_norm} at this depth"


def heads_of_other_width(config: PretrainedConfig) -> str | None:
    heads = config.num_attention_heads
    return f"head_dim {config.head_dim}" if config.head_dim * heads != config.hidden_size else None


def rope_by_depth(config: PretrainedConfig) -> str | None:
    """It has sliding windows, and no rotary embeddings between them, at one depth alone."""
    given = config.sliding_window
    return f"sliding_window {given} at this depth" if given and config.num_hidden_layers != 64 else None


def delta_net(keys: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Width of a value head, and which blocks attend."""
    inner, heads = keys.get("ssm.inner_size"), keys.get("ssm.time_step_rank")
    period, blocks = keys.get("full_attention_interval", 4), keys.get("block_count")
    sizes = inner, heads, period, blocks
    if any(type(size) is not int or size < 1 for size in sizes) or blocks > len(names):
        return {}
    return {"linear_value_head_dim": inner // heads, "layer_types": _attending(period, blocks)}


def _attending(period: int, blocks: int) -> list[str]:
    return ["linear_attention" if (index + 1) % period else "full_attention" for index in range(blocks)]


def unlike_delta_net(config: PretrainedConfig) -> str | None:
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


def rope_in_three_of_four(config: PretrainedConfig) -> str | None:
    rotary = [bool(rope) for rope in config.no_rope_layers[: config.num_hidden_layers]]
    usual = [index % 4 != 3 for index in range(config.num_hidden_layers)]
    return None if rotary == usual else "no_rope_layers other than every fourth"
