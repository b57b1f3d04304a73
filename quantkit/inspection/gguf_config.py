"""The facts of a GGUF file's metadata under the names that config.json has for them.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "{architecture}." before each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.models.containers.safetensors_folder import TensorInfo

PLAIN = {  # GGUF key -> config key
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}
SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}


def config_of(metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """A config.json in miniature: what `positions` and the tables look for."""
    name = metadata.get("general.architecture", "unknown")
    config = {"model_type": name}
    config |= {key: metadata[found] for part, key in PLAIN.items() if (found := f"{name}.{part}") in metadata}
    scaling = {
        key: metadata[found]
        for part, key in SCALING.items()
        if (found := f"{name}.rope.scaling.{part}") in metadata
    }
    if "rope_freqs.weight" in infos:  # llama 3: the factors themselves are stored
        scaling.setdefault("rope_type", "llama3")
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    if "vocab_size" not in config and isinstance(tokens := metadata.get("tokenizer.ggml.tokens"), list):
        config["vocab_size"] = len(tokens)
    return config
