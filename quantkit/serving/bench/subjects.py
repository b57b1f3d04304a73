"""The checkpoints of a benchmark, read from their headers: size, context, and why a workload cannot run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.capacity.source import cache_bytes
from quantkit.errors import require
from quantkit.inspection import record
from quantkit.models import kv_types
from quantkit.models.files import headers, hub
from quantkit.serving.bench.settings import BenchSettings, Workload
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

    def prompts(self, work: Workload, seed: int) -> list[list[int]]:
        """Return random token ids, the same for every model with this vocabulary size. Ids near both ends,
        where special tokens are, do not occur."""
        chance = random.Random(f"{seed} {work.batch} {work.prompt}")
        low, high = self.vocab_size // 4, max(self.vocab_size // 2, self.vocab_size // 4 + 1)
        return [[chance.randrange(low, high) for _ in range(work.prompt)] for _ in range(work.batch)]


@dataclass(frozen=True)
class WorkerJob:
    """The work of one worker process: the workloads of one checkpoint in one engine, for one round."""

    subject: Subject
    engine: str
    settings: BenchSettings
    workloads: Sequence[Workload]

    def refusal(self, work: Workload, dtype: str, free: int) -> str | None:
        """Return why a workload cannot run (context or memory), or None. dtype: precision of decoded weights
        and of the cache. free: free memory in bytes."""
        subject, tokens = self.subject, self.settings.tokens
        if subject.context is not None and work.prompt + tokens > subject.context:
            needed = f"{work.prompt} prompt + {tokens} new tokens"
            return f"{needed} exceed the model's context of {subject.context}"
        if subject.container == "gguf":
            packed = self.engine != "transformers"
        else:
            packed = subject.stored is not None and not self.settings.decoded
        decoded_bytes = int(subject.parameters * kv_types.TYPES[dtype].nbytes)
        weights = subject.weight_bytes if packed else decoded_bytes
        cache = work.batch * (cache_bytes(subject.path, work.prompt + tokens, dtype) or 0)
        if weights + cache > free:
            needed = f"{megabytes(weights)} of weights, {megabytes(cache)} of keys and values"
            return f"needs {needed}; {megabytes(free)} of memory are free"
        return None


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
