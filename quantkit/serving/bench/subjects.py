"""The checkpoints of a benchmark, read from their headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import require
from quantkit.inspection import record
from quantkit.models.files import headers, hub


@dataclass(frozen=True)
class Subject:
    """A checkpoint. source: as the user named it; path: where it is. container: `gguf` or a folder's kind.
    stored: layout of quantized weights, such as `gptq`, else None. weight_bytes, bits_per_weight: over all
    tensors. disk_bytes: of all files. context: the model's maximum number of tokens, or None."""

    source: str
    path: Path
    container: str
    stored: str | None
    weight_bytes: int
    disk_bytes: int
    bits_per_weight: float
    parameters: int
    vocab_size: int
    context: int | None


def open_subject(source: str, revision: str | None = None, offline: bool = False) -> Subject:
    """Read the headers of a folder, a GGUF file, or a hub id (downloaded first). Raises QuantkitError."""
    path = hub.resolve(source, revision, offline)
    contents = headers.open_contents(str(path), None, True, strict=True)
    described = record.describe(contents)
    model, quantization = described["model"], described["quantization"]
    require(model["vocab_size"], f"{source} has no vocab_size", "give a language model")
    return Subject(
        source=source,
        path=path,
        container=contents.container,
        stored=quantization and quantization["layout"],
        weight_bytes=model["bytes"],
        disk_bytes=sum(contents.files.values()),
        bits_per_weight=model["bits_per_weight"],
        parameters=model["parameters"],
        vocab_size=model["vocab_size"],
        context=described["positions"]["context"],
    )
