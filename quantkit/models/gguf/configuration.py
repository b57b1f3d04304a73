"""Convert transformers' configuration to metadata keys and back, by the rows of `architectures`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from quantkit.errors import UNSUPPORTED, name_all, require
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.gguf import architectures, rope, variants
from quantkit.models.gguf.architectures import DEFAULTS, FULL, LATENT, PATTERN, SLIDING, Architecture
from quantkit.models.gguf.variants import head_dim

REQUIRED = ("context_length", "embedding_length", "block_count", "attention.head_count")
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
NEEDED = ("epsilon", "expert_used_count")  # of the keys that not every architecture has
MAX_HEAD_DIM = 1 << 16
SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def to_metadata(config: PretrainedConfig) -> dict[str, Any]:
    """Return the metadata keys of the architecture, `general.architecture` first.

    Raises QuantkitError (exit code 4) naming all fields for which llama.cpp would compute something else.
    """
    row = architectures.of_config(config)
    _refuse_others(row, config)
    keys = {key: _value(config, key, names) for key, names in row.fields.items()}
    keys |= {key: compute(config) for key, compute in LATENT.items()} if row.latent else {}
    keys |= _window(row, config) | rope.metadata(row, config) | dict(row.constants)
    given = {f"{row.name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": row.name} | given


def _value(config: PretrainedConfig, key: str, names: str | tuple[str, ...] | None) -> Any:
    names = () if names is None else (names,) if isinstance(names, str) else names
    found = (getattr(config, name, None) for name in names)
    value = next((value for value in found if value is not None), None)
    return DEFAULTS[key](config) if value is None and key in DEFAULTS else value


def _refuse_others(row: Architecture, config: PretrainedConfig) -> None:
    """Raise QuantkitError if llama.cpp would compute something else for this configuration."""
    why = [
        f"{name} {getattr(config, name)!r}"
        for name, allowed in row.fixed.items()
        if getattr(config, name, allowed[0]) not in allowed
    ]
    size = head_dim(config)
    if not row.free_head_dim and size * config.num_attention_heads != config.hidden_size:
        why.append(f"head_dim {size} with {config.num_attention_heads} heads of {config.hidden_size}")
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and scalar != _attention_scalar(row, config):
        why.append(f"query_pre_attn_scalar {scalar} (only {_attention_scalar(row, config)})")
    if row.refuse and (further := getattr(variants, row.refuse)(config)) is not None:
        why.append(further)
    if why:
        raise row.inexpressible(name_all(why))


def _attention_scalar(row: Architecture, config: PretrainedConfig) -> int:
    """Return n if llama.cpp divides attention scores by the square root of n."""
    if config.num_hidden_layers == row.wide_blocks:
        return config.hidden_size // config.num_attention_heads
    return head_dim(config)


def _window(row: Architecture, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of sliding attention that differ from the architecture's default."""
    if row.window is None:
        return {}
    kinds = list(config.layer_types)
    usual = row.period(len(kinds))
    others = () if row.window_depth else range(1, len(kinds) + 1)
    for period in (usual, *others):
        if kinds == variants.every(period, len(kinds), FULL, SLIDING):
            return {} if period == usual else {PATTERN: period}
    raise row.inexpressible("sliding attention other than in all but every nth block")


def notes(config: PretrainedConfig) -> list[str]:
    """Return notes about features of this model that llama.cpp omits or rounds."""
    row = architectures.of_config(config)
    found = []
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if row.window is None and window and (kinds is None or SLIDING in kinds):
        if window < config.max_position_embeddings:
            found.append(f"llama.cpp attends beyond the sliding window of {window} tokens")
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "yarn" and not row.truncate:
        found.append(
            "llama.cpp rounds the bounds of yarn: dimensions between them turn a little faster or slower"
        )
    if parameters.get("rope_type") == "dynamic":
        found.append(
            f"llama.cpp does not scale rotary embeddings beyond {config.max_position_embeddings} tokens"
        )
    return found


def to_config(
    metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo], factors: Mapping[str, Tensor]
) -> PretrainedConfig:
    """Return the configuration of a file, from its metadata and the headers of its tensors.

    factors: values of the tensors that `rope.parameters` needs. Raises QuantkitError naming keys that are
    absent or invalid; for wrong types the configuration raises its own errors.
    """
    row = architectures.of_file(metadata)
    prefix = f"{row.name}."
    keys = {
        key.removeprefix(prefix): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in metadata.items()
    }  # the shortest decimal that means a float32 of the file: 1e-06, not 9.99999997e-07
    _check(row, keys, infos)
    heads = keys["attention.head_count"]
    keys.setdefault("attention.head_count_kv", heads)
    keys.setdefault("attention.key_length", keys["embedding_length"] // heads)
    values = architectures.config_fields(row, keys, infos)
    if not row.free_head_dim:
        values.pop("head_dim", None)  # it follows, and not every configuration has the field
    values["vocab_size"] = infos["token_embd.weight"].shape[0]
    values["tie_word_embeddings"] = "output.weight" not in infos
    parameters = rope.parameters(row, keys, keys["attention.key_length"], factors)
    if parameters is not None:
        values["rope_parameters"] = parameters
    values |= _sliding(row, keys) | _special_tokens(metadata, values["vocab_size"])
    config = transformers.AutoConfig.for_model(row.model_types[0], **copy.deepcopy(values))
    config.dtype = getattr(torch, architectures.dtype(infos))
    return config


def _check(row: Architecture, keys: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    absent = [f"{row.name}.{key}" for key in REQUIRED if key not in keys]
    absent += [name for name in ("token_embd.weight",) if name not in infos]
    absent += [f"{row.name}.{key}" for key in row.fields if key.endswith(NEEDED) and key not in keys]
    require(not absent, f"the GGUF file lacks {name_all(absent)}", "download the file again")
    whole = (*REQUIRED, "feed_forward_length", "attention.head_count_kv", "attention.key_length", *EXPERTS)
    given = {key: keys[key] for key in whole if key in keys}
    odd = [f"{row.name}.{key}" for key, n in given.items() if type(n) is not int or not 0 < n < 1 << 31]
    what = f"the GGUF file gives no single positive number for {name_all(odd)}"
    require(not odd, what, "quantkit reads models whose blocks are all equal", UNSUPPORTED)
    shape = infos["token_embd.weight"].shape
    limits = {  # the model is built in memory, without its weights: what the tensors do not bear out is not
        "block_count": len(infos),
        "embedding_length": shape[-1],
        "attention.head_count": shape[-1],
        "attention.key_length": MAX_HEAD_DIM,
        "expert_count": max(info.shape[0] for info in infos.values()),
    }
    large = [f"{row.name}.{key} {keys[key]}" for key, limit in limits.items() if keys.get(key, 0) > limit]
    what = f"the GGUF file's token_embd.weight {list(shape)} does not go with {name_all(large)}"
    require(len(shape) == 2 and not large, what, "metadata and tensors belong to different models")


def _sliding(row: Architecture, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of sliding attention and of the scale of attention scores."""
    if row.window is None:
        return {"sliding_window": None} if keys.get("attention.sliding_window") == 0 else {}
    kinds = architectures.layer_types(row, keys, keys["block_count"])
    what = f"{row.name}.{PATTERN} {keys.get(PATTERN)!r} is not a pattern of blocks"
    require(kinds is not None, what, "download the file again")
    if row.wide_blocks is None:
        return {"layer_types": kinds, "sliding_window": keys.get("attention.sliding_window")}
    scalar = keys["attention.key_length"]
    if keys["block_count"] == row.wide_blocks:
        scalar = keys["embedding_length"] // keys["attention.head_count"]
    scales = hasattr(transformers.CONFIG_MAPPING[row.model_types[0]], "query_pre_attn_scalar")
    return {"layer_types": kinds} | ({"query_pre_attn_scalar": scalar} if scales else {})


def _special_tokens(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, int | None]:
    """Return the ids of special tokens by field; None for an id outside the vocabulary."""
    ids = {name: metadata.get(key) for name, key in SPECIAL_TOKENS.items()}
    return {name: id if type(id) is int and 0 <= id < vocab_size else None for name, id in ids.items()}
