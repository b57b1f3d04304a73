"""Variants of architectures: those that llama.cpp does not support, and fields that only a whole file shows.

Rows of architectures.json name these functions. A `refuse` function takes a configuration and returns what
llama.cpp does not support, or None. A `restore` function takes the whole numbers of a file's metadata, by
keys without the architecture's name, and the names of its tensors. It returns further fields of the
configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import name_all

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Keys = Mapping[str, int]
SHARED_LENGTH = "expert_shared_feed_forward_length"
ROPE_SECTIONS = "rope.dimension_sections"  # sections of a head for time, height and width
DELTA = "full_attention", "linear_attention"
UNNORMED = 128  # experts of Llama 4 Maverick, in which llama.cpp does not norm queries


def kv_heads(config: PretrainedConfig) -> int:
    """Return the number of key/value heads, under whatever name the configuration has it."""
    if getattr(config, "new_decoder_architecture", False):
        return config.num_kv_heads
    if hasattr(config, "multi_query"):  # GPTBigCode's num_key_value_heads may be wrong
        return 1 if config.multi_query else config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim(config: PretrainedConfig) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_sections(config: PretrainedConfig) -> list[int]:
    return [*config.rope_parameters.get("mrope_section", (11, 11, 10)), 0]


def periodic(period: int, blocks: int, last: Any, others: Any) -> list[Any]:
    """Return a list with `last` for every `period`-th block and `others` for the rest."""
    return [others if (index + 1) % period else last for index in range(blocks)]


# ---- refusing


def without_capping(config: PretrainedConfig) -> str | None:
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    return "scores and logits without soft-capping" if None in caps else None


def norms_by_depth(config: PretrainedConfig) -> str | None:
    """Refuse norms of queries and keys below 64 blocks and their absence from there on, as llama.cpp does."""
    expected = config.num_hidden_layers >= 64
    return None if config.use_qk_norm == expected else f"use_qk_norm {config.use_qk_norm} at this depth"


def heads_of_other_width(config: PretrainedConfig) -> str | None:
    heads = config.num_attention_heads
    return f"head_dim {config.head_dim}" if config.head_dim * heads != config.hidden_size else None


def grouped_heads(config: PretrainedConfig) -> str | None:
    """Refuse fewer key/value heads than query heads: llama.cpp expects as many in the keys' norm."""
    few = kv_heads(config) < config.num_attention_heads
    return f"{kv_heads(config)} key/value heads of {config.num_attention_heads}" if few else None


def rope_by_depth(config: PretrainedConfig) -> str | None:
    """Refuse sliding attention unless the model has 64 blocks: only there llama.cpp supports it."""
    window = config.sliding_window
    return f"sliding_window {window} at this depth" if window and config.num_hidden_layers != 64 else None


def rope_in_three_of_four(config: PretrainedConfig) -> str | None:
    rotary = [bool(rope) for rope in config.no_rope_layers[: config.num_hidden_layers]]
    usual = periodic(4, config.num_hidden_layers, False, True)
    return None if rotary == usual else "no_rope_layers other than every fourth"


def unlike_delta_net(config: PretrainedConfig) -> str | None:
    """Refuse different numbers or sizes of key and value heads: llama.cpp repeats keys in another order, and
    columns in ggml blocks of 256 cannot be reordered to match. Also refuse angles outside mrope's
    sections."""
    if config.linear_num_value_heads != config.linear_num_key_heads:
        return f"{config.linear_num_value_heads} value heads over {config.linear_num_key_heads} key heads"
    if config.linear_value_head_dim != config.linear_key_head_dim:
        return f"value heads of {config.linear_value_head_dim} over key heads of {config.linear_key_head_dim}"
    kinds, rope = config.layer_types, config.rope_parameters
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    if period < 2 or kinds != periodic(period, len(kinds), *DELTA):
        return "linear attention other than in all but every nth block"
    sections, angles = rope_sections(config), config.head_dim * rope["partial_rotary_factor"] / 2
    whole = all(angle < 3 * sections[angle % 3] for angle in range(int(angles)))
    return None if whole else f"mrope_section {sections[:3]} for {angles:g} angles"


def query_rank_of_lite(config: PretrainedConfig) -> str | None:
    """Refuse q_lora_rank with 26 or 27 blocks: llama.cpp would load the model as DeepSeek-V2-Lite."""
    lite = config.num_hidden_layers in (26, 27) and config.q_lora_rank
    return f"q_lora_rank {config.q_lora_rank} in {config.num_hidden_layers} blocks" if lite else None


def grouped_experts(config: PretrainedConfig) -> str | None:
    """Refuse routers that use all groups of experts: llama.cpp aborts when it loads them."""
    groups = config.n_group, config.topk_group
    return None if groups == (1, 1) or groups[0] > groups[1] else "n_group {}, topk_group {}".format(*groups)


def dense_at_the_end(config: PretrainedConfig) -> str | None:
    last = config.moe_layer_end_index
    return f"moe_layer_end_index {last}" if 0 <= last < config.num_hidden_layers - 1 else None


def other_blocks(config: PretrainedConfig) -> str | None:
    """Refuse unusual patterns of rotary embeddings, experts and norms: a file does not store them."""
    blocks, step = config.num_hidden_layers, config.interleave_moe_layer_step
    usual = {
        "no_rope_layers": periodic(4, blocks, 0, 1),
        "layer_types": periodic(4, blocks, "full_attention", "chunked_attention"),
        "moe_layers": list(range(step - 1, blocks, step)),
        "use_qk_norm": config.num_local_experts != UNNORMED,
    }
    unusual = [f"{name} {getattr(config, name)}" for name in usual if getattr(config, name) != usual[name]]
    unusual += [f"{blocks} blocks (it stops where none is without positions)"] if blocks < 4 else []
    return name_all(unusual) if unusual else None


# ---- restoring


def falcon(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    """Return Falcon's fields: the oldest form has one key/value head, newer ones store the number."""
    two_norms = "blk.0.attn_norm_2.weight" in names
    if multi_query(keys, names)["multi_query"] and not two_norms:
        return {"multi_query": True}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": keys.get("attention.head_count_kv", keys.get("attention.head_count")),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
    }


def multi_query(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    return {"multi_query": keys.get("attention.head_count_kv", keys.get("attention.head_count")) == 1}


def delta_net(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    """Return the size of a value head and the kind of each block, linear or full attention."""
    inner, heads = keys.get("ssm.inner_size", 0), keys.get("ssm.time_step_rank", 0)
    period, blocks = keys.get("full_attention_interval", 4), keys.get("block_count", 0)
    if min(inner, heads, period, blocks) < 1 or blocks > len(names):
        return {}
    return {"linear_value_head_dim": inner // heads, "layer_types": periodic(period, blocks, *DELTA)}


def normed_routing(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    return {"norm_topk_prob": True}


def ernie(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    """Return the number of shared experts (one matrix); all blocks after the dense ones have experts."""
    width = keys.get("expert_feed_forward_length", 0)
    if width < 1:
        return {}
    return {"moe_num_shared_experts": keys.get(SHARED_LENGTH, 0) // width, "moe_layer_end_index": -1}


def latent(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention."""
    rotated = keys.get("rope.dimension_count", 0)
    return {
        "num_key_value_heads": keys.get("attention.head_count"),
        "head_dim": rotated,
        "q_lora_rank": keys.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.get("attention.key_length_mla", 0) - rotated,
    }


def llama4_norms(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    return {"use_qk_norm": keys.get("expert_count") != UNNORMED}
