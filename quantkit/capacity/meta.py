"""A model as transformers builds it: missing values of config.json, parameters, KV cache.

The model is built on the meta device, where tensors are shapes. Importing transformers takes seconds, so
this module is used only if config.json and headers are not enough; no other module here imports transformers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from quantkit.capacity import Unsupported
from quantkit.errors import QuantkitError, first_line
from quantkit.models.files import untrusted
from quantkit.models.gguf import tensors
from quantkit.models.skeleton.meta_model import empty

PROBE_TOKENS = 4  # tokens of the forward pass that fills the cache
LAYERS = (
    "DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer",
)  # fmt: skip
IRRELEVANT = re.compile("quantization_config|attn_implementation")  # may need missing packages
Layer = tuple[str, int, int | None, int, int]  # fields of kv_cache.LayerCache
KEPT = ("keys", "values", "indexer_keys")  # tensors with an entry per token


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's configuration with defaults, under the family's and the usual names."""
    full = _configuration(config)
    usual = (*full.attribute_map, "num_hidden_layers")  # these may be properties, which to_dict omits
    return full.to_dict() | {name: getattr(full, name, None) for name in usual}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every parameter as checkpoints store it. Raises Unsupported."""
    model = _model(_configuration(config))
    try:
        stored = revert_weight_conversion(model, dict(model.named_parameters()))
    except Exception as error:  # conversion rules of some families need values
        raise Unsupported(f"transformers cannot name the stored tensors: {first_line(error)}") from error
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def gguf_tensors(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each tensor of the model's GGUF file, in file order. Raises Unsupported if the
    exporter refuses the model."""
    try:
        return [(target.name, target.shape) for target in tensors.of_config(_configuration(config))]
    except QuantkitError as error:
        raise Unsupported(first_line(error)) from error


def caches(config: Mapping[str, Any]) -> list[Layer]:
    """Run the model on the meta device; return the cache of each block. Raises Unsupported."""
    full = _configuration(config)
    model = _model(full)
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):  # routing needs values
            module.forward = lambda states, *_, **__: states
    try:
        with torch.no_grad():
            output = model(torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta"), use_cache=True)
    except Exception as error:  # any error is the reason that nothing was measured
        raise Unsupported(f"transformers cannot run its {full.model_type}: {first_line(error)}") from error
    cache = output.get("past_key_values") or output.get("cache_params")
    layers = getattr(cache, "layers", ())
    if len(layers) != full.num_hidden_layers:
        raise Unsupported(
            f"{full.model_type} is not known: transformers shows caches of {len(layers)} of its "
            f"{full.num_hidden_layers} layers"
        )
    return [_layer(layer, full, index) for index, layer in enumerate(layers)]


def _layer(layer: Any, config: transformers.PreTrainedConfig, index: int) -> Layer:
    if type(layer).__name__ not in LAYERS:
        raise Unsupported(f"{config.model_type} is not known: unknown cache {type(layer).__name__}")
    kept = [tensor for name in KEPT if (tensor := getattr(layer, name, None)) is not None]
    values = sum(tensor.numel() // tensor.shape[-2] for tensor in kept)
    conv, state = (
        sum(tensor.numel() for tensor in getattr(layer, name, {}).values() if tensor is not None)
        for name in ("conv_states", "recurrent_states")
    )
    window = getattr(layer, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if values and conv + state:
        kind = "hybrid"
    elif values and window:
        kind = "chunked" if types and types[index] == "chunked_attention" else "sliding"
    elif values:
        kind = "latent" if getattr(config, "kv_lora_rank", None) else "full"
    elif conv + state:
        kind = "recurrent"
    else:
        kind = "shared" if getattr(config, "num_kv_shared_layers", 0) else "none"
    return kind, values, window, conv, state


def _configuration(config: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """Return transformers' configuration of the language model, without other modalities."""
    family = config.get("model_type")
    transformers.logging.set_verbosity_error()
    if family not in transformers.CONFIG_MAPPING:
        raise Unsupported(f"{family} is not known to transformers {transformers.__version__}")
    untrusted.refuse_config(config)
    try:
        kept = {key: value for key, value in config.items() if not IRRELEVANT.search(key)}
        language = transformers.CONFIG_MAPPING[family].from_dict(kept).get_text_config()
        if not isinstance(language, transformers.PreTrainedConfig):
            raise TypeError("it has no part that is called text_config")
        return language
    except Exception as error:  # configuration classes raise many kinds of errors
        reason = textwrap.shorten(str(error), 200)
        raise Unsupported(f"config.json is invalid for {family}: {reason}") from error


def _model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    try:
        return empty(config, config.model_type, torch.float32)
    except Exception as error:  # sizes that do not divide, types without a language model
        raise Unsupported(f"transformers cannot build the language model: {first_line(error)}") from error
