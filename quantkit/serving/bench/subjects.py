"""The checkpoints of a benchmark, read from their headers: size, context, and why a point cannot run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit.capacity import Unsupported, formats, kv_cache
from quantkit.capacity.source import Source
from quantkit.capacity.source import read as read_source
from quantkit.errors import QuantkitError, require
from quantkit.inspection import record
from quantkit.models.files import headers, hub
from quantkit.serving.bench.settings import Point, Settings
from quantkit.tables import megabytes


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

    @cached_property
    def _capacity(self) -> Source:
        return read_source(str(self.path))

    def cache_bytes(self, point: Point, tokens: int, bytes_per_value: Fraction) -> int | None:
        """Return the bytes of keys and values after `tokens` new tokens; None if unknown."""
        known = self._capacity
        try:
            caches = kv_cache.layer_caches(known.settings, known.parameters)
        except (Unsupported, QuantkitError):
            return None
        return point.batch * kv_cache.sequence_bytes(caches, point.prompt + tokens, bytes_per_value)

    @cached_property
    def active(self) -> int:
        """Number of parameters that are used for each token."""
        known = self._capacity
        return known.parameters.active(known.settings) or self.parameters

    @cached_property
    def read_share(self) -> float:
        """Share of the weights (0 to 1) that a decoding step reads for one token: without embedding tables,
        of which it reads one row, and without experts that the router does not choose."""
        known = self._capacity
        weights = formats.weights(formats.STORED, known.parameters, known.settings)
        return weights.read_bytes / weights.bytes if weights.read_bytes else 1.0

    def prompts(self, point: Point, seed: int) -> list[list[int]]:
        """Return random token ids, the same for every model with this vocabulary size. Ids near both ends,
        where special tokens are, do not occur."""
        chance = random.Random(f"{seed} {point.batch} {point.prompt}")
        low, high = self.vocab_size // 4, max(self.vocab_size // 2, self.vocab_size // 4 + 1)
        return [[chance.randrange(low, high) for _ in range(point.prompt)] for _ in range(point.batch)]


@dataclass(frozen=True)
class Job:
    """The work of one worker process: the points of one checkpoint in one engine, for one round."""

    subject: Subject
    engine: str
    settings: Settings
    points: Sequence[Point]

    def refusal(self, point: Point, value_bytes: int, free: int) -> str | None:
        """Return why a point cannot run (context or memory), or None. value_bytes: bytes of a decoded weight
        and of a value in the cache. free: free memory in bytes."""
        subject, tokens = self.subject, self.settings.tokens
        if subject.context is not None and point.prompt + tokens > subject.context:
            requested = f"{point.prompt} prompt + {tokens} new tokens"
            return f"{requested} exceed the model's context of {subject.context}"
        own = subject.container == "gguf" and self.engine != "transformers"
        packed = own or (subject.stored not in (None, "gguf") and not self.settings.decoded)
        weights = subject.weight_bytes if packed else subject.parameters * value_bytes
        cache = subject.cache_bytes(point, tokens, Fraction(value_bytes)) or 0
        if weights + cache > free:
            parts = f"{megabytes(weights)} of weights, {megabytes(cache)} of keys and values"
            return f"needs {parts}; {megabytes(free)} of memory are free"
        return None


def open_subject(source: str, revision: str | None = None, offline: bool = False) -> Subject:
    """Read the headers of a folder, a GGUF file, or a hub id (downloaded first). Raises QuantkitError."""
    path = hub.resolve(source, revision, offline)
    contents = headers.open_contents(str(path), None, True, strict=True)
    found: dict[str, Any] = record.describe(contents)
    model, quantization = found["model"], found["quantization"]
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
        context=found["positions"]["context"],
    )
