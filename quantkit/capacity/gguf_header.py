"""A GGUF file as `plan` sees it: its header, with transformers' names for what llama.cpp calls otherwise.

Settings come from the metadata by the rows of llamacpp/architectures.py. An architecture that has none keeps
the keys of its metadata, so that what is unusual about its cache shows, and is refused (attention.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.capacity.parameters import CONV1D_FAMILIES, Tensor
from quantkit.capacity.settings import Settings
from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.inspection.gguf_config import config_of
from quantkit.models.containers import gguf_file
from quantkit.models.containers.safetensors_folder import TensorInfo
from quantkit.models.llamacpp import architectures
from quantkit.models.llamacpp.architectures import Architecture

FLOATS = ("F32", "F16", "BF16")
# Architectures that are no row of the table, whose caches are those of a family that attention.py knows.
FURTHER = {"gemma": "gemma", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
NAMES = {  # part of a GGUF name -> what most checkpoints call it; the first that matches counts
    r"^token_embd\.": "model.embed_tokens.",
    r"^position_embd\.": "model.embed_positions.",
    r"^output\.": "lm_head.",
    r"\.attn_([qkv])\.": r".self_attn.\1_proj.",
    r"\.attn_qkv\.": ".self_attn.qkv_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.ffn_(gate|up|down)_exps\.": r".mlp.experts.\1_proj.",
    r"\.ffn_(gate|up|down)\.(\d+)\.": r".mlp.experts.\2.\1_proj.",  # in old files one by one
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
}
FACTORS = re.compile(r"rope_(freqs|factors_\w+)\.weight")  # divisors of rotary frequencies: no parameters
PATTERN = "attention.sliding_window_pattern"  # every so many blocks attend to all, or a switch for each
HALF = 2  # bytes of a weight in 16 bit


@dataclass(frozen=True)
class Header:
    """entries: a parameter each; quantized ones as of their original in 16 bit."""

    settings: Settings
    entries: list[Tensor]


def read(path: Path) -> Header:
    """The header of a file. Raises QuantkitError for one that is broken, or no language model's."""
    metadata, infos = gguf_file.read_header(path)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or f"{name}.block_count" not in metadata:
        raise QuantkitError(
            f"{path} is no language model",
            hint="give the GGUF file of a model, not of an importance matrix or a vocabulary",
            exit_code=UNSUPPORTED,
        )
    rows = [row for row in architectures.TABLE if row.name == name]
    config = _by_row(rows[0], metadata, infos) if rows else _by_keys(name, metadata, infos)
    config |= {
        key: metadata[found] for part, key in EXPERTS.items() if (found := f"{name}.{part}") in metadata
    }
    config["tie_word_embeddings"] = "output.weight" not in infos
    config["dtype"] = _dtype(infos)
    settings = Settings(config)
    entries = [_entry(info, settings) for info in infos.values() if not FACTORS.fullmatch(info.name)]
    return Header(settings, entries)


def _dtype(infos: Mapping[str, TensorInfo]) -> str:
    """What a job computes in where the hardware does: the type of most matrices, unless they are packed."""
    types = Counter(info.dtype for info in infos.values() if len(info.shape) == 2)
    common, _ = max(types.items(), key=lambda item: item[1], default=("F32", 0))
    return {"F16": "float16", "BF16": "bfloat16"}.get(common, "float32")


def _by_row(
    row: Architecture, metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """The configuration of an architecture that quantkit reads and writes."""
    config = config_of(metadata, infos) | {"model_type": row.model_types[0]}
    for key, names in row.fields.items():
        value = metadata.get(f"{row.name}.{key}")
        if value is not None and names:
            config[names if isinstance(names, str) else names[0]] = value
    for switch, tensor in row.flags.items():
        absent = tensor.startswith("not ")
        config[switch] = (tensor.removeprefix("not ") in infos) != absent
    if row.restore:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        config |= row.restore(heads, infos.keys())
    if not config.get("sliding_window"):  # 0: none
        config["sliding_window"] = None
    pattern = metadata.get(f"{row.name}.{PATTERN}", row.window)
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    return _uniform(config)


def _by_keys(name: str, metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The configuration of any other: known keys as config.json has them, the others as they are."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    config = own | config_of(metadata, infos)
    config["model_type"] = FURTHER.get(name, f"{name} (GGUF)")
    if "attention.key_length" in own:
        config["head_dim"] = own["attention.key_length"]
    return _uniform(config)


def _uniform(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are said for every block become one where they are all alike; else they are not known."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        if isinstance(config.get(key), list):
            values = set(config.pop(key))
            if len(values) == 1:
                config[key] = values.pop()
            elif key != "intermediate_size":
                config["num_attention_heads"] = None
    # what llama.cpp takes where its file says nothing, which is not what transformers would fill in
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    return dict.fromkeys(("head_dim", "sliding_window")) | config


def _entry(info: TensorInfo, settings: Settings) -> Tensor:
    name, shape = info.name, info.shape
    for pattern, usual in NAMES.items():
        name, found = re.subn(pattern, usual, name)
        if found:
            break
    if settings.model_type in CONV1D_FAMILIES and name.startswith("blk.") and len(shape) == 2:
        shape = shape[::-1]  # transformers stores these [in, out]
    if info.dtype in FLOATS:
        return Tensor(name, shape, info.nbytes)
    return Tensor(name, shape, HALF * math.prod(shape), info.nbytes)
