"""The metadata of a GGUF file as a config.json: transformers' names for what llama.cpp calls otherwise.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the architecture before each. By the rows of
`architectures`; an architecture that has none keeps the keys of its metadata, so that what is unusual about
it shows. Nothing imports torch: `configuration.to_config` builds on `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.models.files.safetensors_folder import TensorInfo
from quantkit.models.gguf import variants
from quantkit.models.gguf.architectures import COMMON, Architecture, named

Infos = Mapping[str, TensorInfo]
# Architectures that are no row of the table, whose caches are those of a family that is known.
FURTHER = {"gemma": "gemma"}
PLAIN = {key: name for key, name in COMMON.items() if key != "attention.value_length"} | {
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
FACTORS = {"rope_freqs.weight": "llama3", "rope_factors_long.weight": "longrope"}  # may stand for the type
PATTERN = "attention.sliding_window_pattern"  # every so many blocks attend to all, or a switch for each
FULL, SLIDING = "full_attention", "sliding_attention"


def refuse_imatrix(source: str | Path, metadata: Mapping[str, Any]) -> None:
    """Raise QuantkitError (exit code 4) for a file of sums over activations."""
    if metadata.get("general.type") == "imatrix":
        raise QuantkitError(
            f"{source} is an importance matrix, not a model", "give it to --imatrix", UNSUPPORTED
        )


def config_of(metadata: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the configuration that a file of any architecture describes."""
    name = str(metadata.get("general.architecture", "unknown"))
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config = {field: own[key] for key, field in PLAIN.items() if key in own}
    row = named(name, own)
    if row:
        config |= {"model_type": row.model_types[0]} | fields(row, own, infos)
    else:
        config = own | config | {"model_type": FURTHER.get(name, f"{name} (GGUF)")}
    if not config.get("sliding_window"):  # 0: none
        config["sliding_window"] = None
    elif row and (kinds := layer_types(row, own, len(infos))):
        config["layer_types"] = kinds
    scaling = {field: own[key] for key, field in SCALING.items() if key in own}
    for tensor, kind in FACTORS.items():
        if tensor in infos:
            scaling.setdefault("rope_type", kind)
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    if "vocab_size" not in config and isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(tokens)
    return _uniform(config) | {"tie_word_embeddings": "output.weight" not in infos, "dtype": dtype(infos)}


def fields(row: Architecture, keys: Mapping[str, Any], infos: Infos) -> dict[str, Any]:
    """Return the fields of the configuration that the row's keys and the names of tensors give."""
    found: dict[str, Any] = {
        names if isinstance(names, str) else names[-1]: keys[key]
        for key, names in row.fields.items()
        if names is not None and keys.get(key) is not None
    }
    for name, tensor in row.flags.items():
        found[name] = (tensor.removeprefix("not ") in infos) != tensor.startswith("not ")
    if row.restore:
        found |= getattr(variants, row.restore)(keys, infos.keys())
    return found


def layer_types(row: Architecture, keys: Mapping[str, Any], most: int) -> list[str] | None:
    """Return the kind of attention of every block, of `most` at most; None if the file does not give it."""
    blocks = keys.get("block_count")
    period = keys.get(PATTERN, row.period(blocks))
    if isinstance(period, list):
        return [SLIDING if slides else FULL for slides in period] if len(period) == blocks else None
    if type(period) is not int or type(blocks) is not int or period < 1 or blocks > most:
        return None
    return variants.every(period, blocks, FULL, SLIDING)


def dtype(infos: Infos) -> str:
    """Return the type in which a job computes: the file's own 16 bit, unless weights are packed."""
    stored = {info.dtype for info in infos.values()} - {"F32"}
    return {frozenset({"F16"}): "float16", frozenset({"BF16"}): "bfloat16"}.get(frozenset(stored), "float32")


def _uniform(config: dict[str, Any]) -> dict[str, Any]:
    """Return configuration with one number for all blocks where they are alike; other lists are dropped."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        if isinstance(config.get(key), list):
            values = set(config.pop(key))
            if len(values) == 1:
                config[key] = values.pop()
            elif key != "intermediate_size":
                config["num_attention_heads"] = None
    # what llama.cpp takes where its file says nothing, which is not what transformers would fill in
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    return {"head_dim": None} | config
