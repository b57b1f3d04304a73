"""All metadata of a GGUF file: what it is, the architecture's keys, the tokenizer's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from gguf import GGML_QUANT_VERSION
from gguf.utility import model_weight_count_rounded_notation
from huggingface_hub import metadata_load

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.gguf import configuration, file_types, vocabulary
from quantkit.models.gguf.checkpoint import GgufCheckpoint
from quantkit.models.gguf.tensors import Target
from quantkit.models.gguf.token_models import Warn

PHI3_TOKENS = {"<s>", "<unk>", "<|endoftext|>"}  # llama.cpp demands them of a model that is named phi-3
README_BYTES = 1 << 20
TOKEN_TYPE = "tokenizer.ggml.token_type"


def assemble(
    checkpoint: Checkpoint, targets: Iterable[Target], file_type: str, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return keys and values in the order in which they are written.

    file_type: llama-quantize's name, such as "Q4_K_M" or "F16". tokenizer: what `tokenizer`
    returned. Raises QuantkitError as `configuration.to_metadata` does.
    """
    keys = configuration.to_metadata(checkpoint.text_config)
    weights = sum(math.prod(target.shape) for target in targets if target.values is None)
    general = {
        "general.architecture": keys.pop("general.architecture"),
        "general.type": "model",
        "general.name": _name(checkpoint.name, tokenizer.get("tokenizer.ggml.tokens", ())),
        "general.size_label": model_weight_count_rounded_notation(weights),
        "general.license": _licence(checkpoint.folder),
    }
    kind = {  # last, where llama-quantize puts them: its output of an F16 file can be compared byte by byte
        "general.quantization_version": GGML_QUANT_VERSION,
        "general.file_type": file_types.number(file_type),
    }
    known = {key: value for key, value in general.items() if value is not None}
    return known | keys | dict(tokenizer) | kind


def tokenizer(checkpoint: Checkpoint, size: int, pre: str | None, warn: Warn) -> dict[str, Any]:
    """Return the keys that begin with `tokenizer.`: see `vocabulary.metadata`; a GGUF file's own are copied,
    but for `pre`."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return vocabulary.metadata(checkpoint.folder, size, pre, warn)
    found = {key: value for key, value in checkpoint.metadata.items() if key.startswith("tokenizer.")}
    if (types := found.get(TOKEN_TYPE)) is not None:
        found[TOKEN_TYPE] = np.array(types, np.int32)  # what llama.cpp reads; they are never negative
    return found | ({"tokenizer.ggml.pre": pre} if pre else {})


def _name(name: str, tokens: Iterable[str]) -> str:
    """Return the model's name, spelled so that llama.cpp does not take another model for Phi-3."""
    if re.search("phi-?3", name, re.IGNORECASE) and not set(tokens) >= PHI3_TOKENS:
        name = re.sub("(phi)-?3", r"\1_3", name, flags=re.IGNORECASE)
    return name


def _licence(folder: Path) -> str | None:
    """Return the licence that the model card declares."""
    card = folder / "README.md"
    if not card.is_file() or card.stat().st_size > README_BYTES:
        return None
    try:
        licence = (metadata_load(card) or {}).get("license")
    except (ValueError, yaml.YAMLError):  # a card that does not parse declares nothing
        return None
    return licence if isinstance(licence, str) else None
