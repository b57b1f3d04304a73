"""Convert transformers' configuration to metadata keys and back, by the rows of `architectures`."""

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
from quantkit.models.gguf.token_models import ROLES
from quantkit.models.gguf.variants import head_dim

REQUIRED = ("context_length", "embedding_length", "block_count", "attention.head_count")
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
NEEDED = ("epsilon", "expert_used_count")  # endings of keys that are required if the architecture has them
MAX_HEAD_DIM = 1 << 16


def to_metadata(config: PretrainedConfig) -> dict[str, Any]:
    """Return the metadata keys of the architecture, `general.architecture` first.

    Raises QuantkitError (exit code 4) naming all fields for which llama.cpp would compute something else.
    """
    arch = architectures.of_config(config)
    _refuse_others(arch, config)
    keys = {key: _value(config, key, names) for key, names in arch.fields.items()}
    keys |= {key: compute(config) for key, compute in LATENT.items()} if arch.latent else {}
    keys |= _window(arch, config) | rope.metadata(arch, config) | dict(arch.constants)
    written = {f"{arch.name}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": arch.name} | written


def _value(config: PretrainedConfig, key: str, names: str | tuple[str, ...] | None) -> Any:
    names = () if names is None else (names,) if isinstance(names, str) else names
    values = (getattr(config, name, None) for name in names)
    value = next((value for value in values if value is not None), None)
    return DEFAULTS[key](config) if value is None and key in DEFAULTS else value


def _refuse_others(arch: Architecture, config: PretrainedConfig) -> None:
    """Raise QuantkitError if llama.cpp would compute something else for this configuration."""
    why = [
        f"{name} {getattr(config, name)!r}"
        for name, allowed in arch.fixed.items()
        if getattr(config, name, allowed[0]) not in allowed
    ]
    size, hidden, heads = head_dim(config), config.hidden_size, config.num_attention_heads
    if not arch.free_head_dim and size * heads != hidden:
        why.append(f"head_dim {size} with {heads} heads of {hidden}")
    scalar = getattr(config, "query_pre_attn_scalar", None)
    expected = arch.score_scalar(config.num_hidden_layers, hidden, heads, size)
    if scalar not in (None, expected):
        why.append(f"query_pre_attn_scalar {scalar} (only {expected})")
    if arch.refuse and (reason := getattr(variants, arch.refuse)(config)) is not None:
        why.append(reason)
    if why:
        raise arch.inexpressible(name_all(why))


def _window(arch: Architecture, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of sliding attention that differ from the architecture's default."""
    if arch.window is None:
        return {}
    kinds = list(config.layer_types)
    usual = arch.period(len(kinds))
    others = () if arch.window_depth else range(1, len(kinds) + 1)
    for period in (usual, *others):
        if kinds == variants.periodic(period, len(kinds), FULL, SLIDING):
            return {} if period == usual else {PATTERN: period}
    raise arch.inexpressible("sliding attention other than in all but every nth block")


def notes(config: PretrainedConfig) -> list[str]:
    """Return notes about features of this model that llama.cpp omits or rounds."""
    arch = architectures.of_config(config)
    messages, context = [], getattr(config, "max_position_embeddings", 0)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if arch.window is None and window and window < context and (kinds is None or SLIDING in kinds):
        messages.append(f"llama.cpp attends beyond the sliding window of {window} tokens")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind == "yarn" and not arch.truncate:
        rounded = "dimensions between them turn a little faster or slower"
        messages.append(f"llama.cpp rounds the bounds of yarn: {rounded}")
    if kind == "dynamic":
        messages.append(f"llama.cpp does not scale rotary embeddings beyond {context} tokens")
    return messages


def to_config(
    metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo], factors: Mapping[str, Tensor]
) -> PretrainedConfig:
    """Return the configuration of a file, from its metadata and the headers of its tensors.

    factors: values of the tensors that `rope.parameters` needs. Raises QuantkitError naming keys that are
    absent or invalid; for wrong types the configuration raises its own errors.
    """
    arch = architectures.of_file(metadata)
    prefix = f"{arch.name}."
    keys = {
        key.removeprefix(prefix): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in metadata.items()
    }  # the shortest decimal of a float32: 1e-06, not 9.99999997e-07
    _check(arch, keys, infos)
    heads = keys["attention.head_count"]
    keys.setdefault("attention.head_count_kv", heads)
    keys.setdefault("attention.key_length", keys["embedding_length"] // heads)
    values = architectures.config_fields(arch, keys, infos)
    if not arch.free_head_dim:
        values.pop("head_dim", None)  # derived from other fields; some configurations lack it
    values["vocab_size"] = infos["token_embd.weight"].shape[0]
    values["tie_word_embeddings"] = "output.weight" not in infos
    parameters = rope.parameters(arch, keys, keys["attention.key_length"], factors)
    if parameters is not None:
        values["rope_parameters"] = parameters
    values |= _sliding(arch, keys)
    for role in ("bos", "eos", "pad"):
        number, size = metadata.get(f"tokenizer.ggml.{ROLES[role]}_token_id"), values["vocab_size"]
        values[f"{role}_token_id"] = number if type(number) is int and 0 <= number < size else None
    config = transformers.AutoConfig.for_model(arch.model_types[0], **copy.deepcopy(values))
    config.dtype = getattr(torch, architectures.dtype(infos))
    return config


def _check(arch: Architecture, keys: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    absent = [f"{arch.name}.{key}" for key in REQUIRED if key not in keys]
    absent += [name for name in ("token_embd.weight",) if name not in infos]
    absent += [f"{arch.name}.{key}" for key in arch.fields if key.endswith(NEEDED) and key not in keys]
    require(not absent, f"the GGUF file lacks {name_all(absent)}", "download the file again")
    whole = (*REQUIRED, "feed_forward_length", "attention.head_count_kv", "attention.key_length", *EXPERTS)
    given = {key: keys[key] for key in whole if key in keys}
    wrong = [f"{arch.name}.{key}" for key, n in given.items() if type(n) is not int or not 0 < n < 1 << 31]
    what = f"the GGUF file gives no single positive number for {name_all(wrong)}"
    require(not wrong, what, "quantkit reads models whose blocks are all equal", UNSUPPORTED)
    shape = infos["token_embd.weight"].shape
    limits = {  # limits from the tensors, because the model is built in memory without its weights
        "block_count": len(infos),
        "embedding_length": shape[-1],
        "attention.head_count": shape[-1],
        "attention.key_length": MAX_HEAD_DIM,
        "expert_count": max(info.shape[0] for info in infos.values()),
    }
    large = [f"{arch.name}.{key} {keys[key]}" for key, limit in limits.items() if keys.get(key, 0) > limit]
    what = f"the GGUF file's token_embd.weight {list(shape)} does not go with {name_all(large)}"
    require(len(shape) == 2 and not large, what, "metadata and tensors belong to different models")


def _sliding(arch: Architecture, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of sliding attention and of the scale of attention scores."""
    if arch.window is None:
        return {"sliding_window": None} if keys.get("attention.sliding_window") == 0 else {}
    kinds = architectures.layer_types(arch, keys, keys["block_count"])
    what = f"{arch.name}.{PATTERN} {keys.get(PATTERN)!r} is not a pattern of blocks"
    require(kinds is not None, what, "download the file again")
    if arch.wide_blocks is None:
        return {"layer_types": kinds, "sliding_window": keys.get("attention.sliding_window")}
    if not hasattr(transformers.CONFIG_MAPPING[arch.model_types[0]], "query_pre_attn_scalar"):
        return {"layer_types": kinds}
    sizes = (keys[key] for key in ("block_count", "embedding_length", "attention.head_count"))
    scalar = arch.score_scalar(*sizes, keys["attention.key_length"])
    return {"layer_types": kinds, "query_pre_attn_scalar": scalar}
