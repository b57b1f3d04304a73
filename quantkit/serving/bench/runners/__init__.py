"""The engines that are measured, one file each, named after the engine.

`prepare(job)` imports the engine's libraries. It returns torch's device (None where torch does not compute)
and the bytes of one decoded weight or value of the cache. `Runner(job)` loads the model and has `facts`. Its
`run(prompts, tokens)` takes prompts of equal length, greedily generates exactly `tokens` tokens after each,
and returns a `Timing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from quantkit.errors import USAGE, one_of, require
from quantkit.serving.bench.settings import Settings

NAMES = ("auto", "transformers", "llama.cpp")


@dataclass(frozen=True)
class Facts:
    """A loaded model. weight_bytes: in memory. kernels: name of the kernels that multiply by the weights.
    packed: whether weights stay quantized in memory; note: why not. attention: transformers' name."""

    version: str
    weight_bytes: int
    kernels: str = "llama.cpp ggml"
    packed: bool = True
    note: str = ""
    dtype: str = "float32"
    attention: str | None = None


@dataclass(frozen=True)
class Timing:
    """One run: all prompts prefilled, then decoded.

    prefill_seconds: time until every sequence had its first token. decode_tokens: later tokens of all
    sequences together; decode_seconds: their time. step_seconds: times from one token of a sequence to its
    next. kv_bytes: bytes of keys and values, None if unknown.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    step_seconds: Sequence[float]
    kv_bytes: int | None


def find(engine: str) -> ModuleType:
    """Return the module in this folder that runs an engine."""
    return import_module(f"{__name__}.{engine.replace('.', '')}")


def names(settings: Settings) -> tuple[str, ...]:
    """Return the engines named by --engine. Raises QuantkitError for an unknown one."""
    found = settings.names("engine")
    hint = "quantkit serve ./model --engine vllm, then vllm bench serve"
    require("vllm" not in found, "bench does not run vLLM", hint, USAGE)
    return tuple(one_of(name, NAMES, f"no engine {name!r}") for name in found)
