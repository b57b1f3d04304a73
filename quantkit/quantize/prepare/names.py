"""Names of outputs, derived from the source."""

from __future__ import annotations

from pathlib import Path

from quantkit.models.files import gguf_shards


def base_name(source: str) -> str:
    """Return the name of a source on which output names are based."""
    path = Path(source) if source not in (".", "..") else Path(source).resolve()
    return gguf_shards.whole(path).name.removesuffix(".gguf") or "model"
