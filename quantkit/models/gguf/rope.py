"""Convert rotary embeddings between transformers' `rope_parameters` and llama.cpp's keys and factor tensors.

llama.cpp (src/llama-context.cpp, ggml's rope) stores linear and YaRN scaling as numbers in the metadata,
LongRoPE as two tensors of divisors of the frequencies (for contexts up to the original length and beyond),
and Llama 3's scaling as one such tensor. With YaRN it multiplies queries and keys by 1 + 0.1 ln(factor)
(arXiv:2309.00071, section 3.4) and by `attn_factor`.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.errors import name_all
from quantkit.models.gguf.architectures import Architecture
from quantkit.models.gguf.variants import ROPE_SECTIONS, head_dim

LONG, SHORT, FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
ATTENTION, LOG_MULTIPLIER = "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # all models so far, except Llama 4
LLAMA4 = {"low_freq_factor": 1.0, "high_freq_factor": 1.0}  # no blend between short and long waves
LLAMA3_CONTEXTS = 8192, *(1 << k for k in range(6, 21))  # all models so far have the first
YARN = {"beta_fast": 32, "beta_slow": 1}  # llama.cpp's constants


def metadata(arch: Architecture, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of rotary embeddings, without the architecture's name. Raises QuantkitError if
    llama.cpp cannot express them."""
    if arch.rope is None:
        return {}
    rope, sliding = _parameters(config)
    kind = rope["rope_type"]
    partial = rope.get("partial_rotary_factor") or 1.0
    dimensions = int(head_dim(config) * partial)
    if kind not in ("default", "dynamic", *arch.rope):
        raise arch.inexpressible(f"rotary embeddings scaled by {kind!r}")
    if unsupported := _unsupported(rope, kind, dimensions, arch.truncate):
        raise arch.inexpressible(f"{kind} with {name_all(unsupported)}")
    if partial != 1.0 and not arch.partial_rotary:
        raise arch.inexpressible(f"rotating {partial:g} of each head")
    keys: dict[str, Any] = {"rope.dimension_count": dimensions, "rope.freq_base": float(rope["rope_theta"])}
    if sliding is not None:
        if sliding["rope_type"] != "default":
            raise arch.inexpressible("scaled rotary embeddings in blocks with sliding attention")
        keys["rope.freq_base_swa"] = float(sliding["rope_theta"])
    if arch.latent and kind == "yarn":
        return keys | _latent_yarn(arch, rope, config)
    return keys | _scaling(config, rope, kind)


def _unsupported(rope: Mapping[str, Any], kind: str, dimensions: int, truncate: bool) -> list[str]:
    """Return the parameters of a scaling that llama.cpp has no key for, or would reject."""
    if kind == "yarn":
        usual = YARN | {"truncate": truncate}
        values = {"truncate": True} | {name: value for name, value in rope.items() if value is not None}
        return [f"{name} {values[name]}" for name in usual if values.get(name, usual[name]) != usual[name]]
    if kind == "longrope":
        lengths = {name: len(rope[name]) for name in ("long_factor", "short_factor")}
        return [f"{length} numbers as {name}" for name, length in lengths.items() if 2 * length != dimensions]
    return []


def _parameters(config: PretrainedConfig) -> tuple[dict, dict | None]:
    """Return the parameters in blocks with full attention, and with sliding attention (None if the same)."""
    rope = config.rope_parameters
    if "full_attention" in rope:
        return rope["full_attention"], rope.get("sliding_attention")
    return rope, None


def _scaling(config: PretrainedConfig, rope: dict, kind: str) -> dict[str, Any]:
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind not in ("yarn", "longrope"):
        return {}
    original = rope["original_max_position_embeddings"]
    keys: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.original_context_length": original}
    if kind == "longrope":
        return keys | {ATTENTION: _attention(config, kind)}
    factor = rope["factor"] or config.max_position_embeddings / original
    keys["rope.scaling.factor"] = float(factor)
    if rope.get("attention_factor") is not None or (rope.get("mscale") and rope.get("mscale_all_dim")):
        keys[ATTENTION] = _attention(config, kind) / _mscale(factor)
    return keys


def _latent_yarn(arch: Architecture, rope: dict, config: PretrainedConfig) -> dict[str, Any]:
    """Return YaRN's keys for latent attention: rotated vectors keep their size, and attention scores grow by
    `mscale_all_dim`."""
    share = rope.get("mscale_all_dim")
    if not share or rope.get("mscale") != share or rope.get("attention_factor") is not None:
        raise arch.inexpressible("yarn with an attention_factor, or without mscale equal to mscale_all_dim")
    return {key: value for key, value in _scaling(config, rope, "yarn").items() if key != ATTENTION} | {
        LOG_MULTIPLIER: 0.1 * share
    }


def _mscale(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _attention(config: PretrainedConfig, kind: str) -> float:
    """Return the factor that multiplies rotated queries and keys."""
    _, factor = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(config), torch.device("cpu"))
    return float(factor)


def factors(arch: Architecture, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the factor tensors that the file needs: float32 `[dimensions / 2]`, by GGUF name."""
    if arch.rope is None:
        return {}
    rope, _ = _parameters(config)
    if rope["rope_type"] == "longrope":
        return {LONG: torch.tensor(rope["long_factor"]), SHORT: torch.tensor(rope["short_factor"])}
    if rope["rope_type"] == "llama3":
        return {FREQUENCIES: _llama3(rope, head_dim(config))}
    return {}


def _llama3(rope: Mapping[str, Any], dimensions: int) -> Tensor:
    """Return the divisors of the frequencies: 1 for short waves, `factor` for long waves, a blend between.

    Source: Llama 3.1's reference code (`apply_scaling`).
    """
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions
    wavelength = 2 * math.pi * rope["rope_theta"] ** exponents
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = ((rope["original_max_position_embeddings"] / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / factor + share)).float()


def parameters(
    arch: Architecture, keys: Mapping[str, Any], dimensions: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """Return `rope_parameters`, from a file's keys without the architecture's name and its factor tensors.

    dimensions: size of a head. Raises QuantkitError if the scaling is unknown.
    """
    if arch.rope is None:
        return None
    rope = {"rope_theta": keys.get("rope.freq_base", 10000.0)} | _scaled(arch, keys, dimensions, tensors)
    if arch.partial_rotary:
        rope["partial_rotary_factor"] = keys.get("rope.dimension_count", dimensions) / dimensions
    if ROPE_SECTIONS in keys:
        rope["mrope_section"] = list(keys[ROPE_SECTIONS])[:3]
    if arch.name != "gemma3":
        return rope
    sliding = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10000.0)}
    return {"full_attention": rope, "sliding_attention": sliding}


def _scaled(
    arch: Architecture, keys: Mapping[str, Any], dimensions: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    original = keys.get("rope.scaling.original_context_length", keys["context_length"])
    if LONG in tensors and SHORT in tensors:
        return _longrope(tensors[LONG], tensors[SHORT], keys.get(ATTENTION, 1.0), original)
    if FREQUENCIES in tensors:
        return _read_frequencies(tensors[FREQUENCIES], keys, dimensions)
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        factor = keys.get("rope.scaling.factor", 1.0)
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if ATTENTION in keys:
            rope["attention_factor"] = keys[ATTENTION] * _mscale(factor)
        if not arch.truncate:
            rope["truncate"] = False
        if arch.latent:
            rope["mscale"] = rope["mscale_all_dim"] = round(10 * keys.get(LOG_MULTIPLIER, 0.0), 6)
        return rope
    if kind not in ("none", "longrope"):
        raise arch.inexpressible(f"rotary embeddings scaled by {kind!r}")
    return {"rope_type": "default"}


def _read_frequencies(divisors: Tensor, keys: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """Return Llama 3's scaling if it gives these divisors, else LongRoPE with them for every length."""
    theta, factor = keys.get("rope.freq_base", 10000.0), divisors.max().item()
    for original in LLAMA3_CONTEXTS:
        for bounds in (LLAMA3, LLAMA4):
            usual = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original}
            expected = _llama3(usual | bounds | {"rope_theta": theta}, dimensions)
            if expected.shape == divisors.shape and torch.allclose(expected, divisors, rtol=1e-5):
                return usual | bounds
    return _longrope(divisors, divisors, 1.0, keys["context_length"])


def _longrope(long: Tensor, short: Tensor, attention: float, original: int) -> dict[str, Any]:
    factors = {"long_factor": long.tolist(), "short_factor": short.tolist(), "attention_factor": attention}
    return {"rope_type": "longrope", "original_max_position_embeddings": original} | factors
