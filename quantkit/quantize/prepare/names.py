"""Names of outputs, derived from source and options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.models.files import gguf_shards
from quantkit.quantize import methods


def derived(source: str, method: str, options: Any, override: Sequence[str] = ()) -> Path:
    """Return the name of a job's output, such as `model-gptq-w4g128`, with `mixed` if bits are overridden."""
    suffix = methods.load(method).suffix(options)
    bits = getattr(options, "bits", None)
    if any(methods.parse_override(text).bits != bits for text in override):
        suffix = re.sub(r"-w\d+(channel|g\d+)", "-mixed", suffix)
    return Path(f"{base_name(source)}-{suffix}")


def base_name(source: str) -> str:
    """Return the name of a source on which output names are based."""
    path = Path(source) if source not in (".", "..") else Path(source).resolve()
    return gguf_shards.whole(path).name.removesuffix(".gguf") or "model"
