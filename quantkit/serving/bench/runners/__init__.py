"""The engines that are measured, one file each, found by its name: how it loads, prefills and decodes.

`prepare(job)` imports the engine's libraries and returns torch's device, or None where torch does not
compute, and the bytes of a decoded weight and of a value in the cache. `Runner(job)` loads the model. A
runner has `facts`; its `run(prompts, tokens)` generates exactly `tokens` tokens after each of the prompts, of
one length, greedily, and returns a `Timing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from quantkit.errors import USAGE, QuantkitError, one_of
from quantkit.serving.bench.settings import Settings

NAMES = ("auto", "transformers", "llama.cpp")


@dataclass(frozen=True)
class Facts:
    """A loaded model. kernels: of products by the weights; packed: whether the weights lie in memory as
    codes; note: why not. weight_bytes: in memory. dtype: of the computation."""

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

    prefill_seconds: until every sequence had its first token. decode_tokens: made after that, by all
    sequences together, in decode_seconds. step_seconds: from one token of a sequence to its next. kv_bytes:
    of keys and values, None where they are not known.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    step_seconds: Sequence[float]
    kv_bytes: int | None


def find(engine: str) -> ModuleType:
    """Return the module of an engine."""
    return import_module(f"{__name__}.{engine.replace('.', '')}")


def names(settings: Settings) -> tuple[str, ...]:
    """Return the engines of --engine. Raises QuantkitError for an unknown one."""
    found = settings.names("engine")
    if "vllm" in found:
        hint = "quantkit serve ./model --engine vllm, then quantkit bench server http://127.0.0.1:8000"
        raise QuantkitError("bench measures vLLM as a server", hint, USAGE)
    return tuple(one_of(name, NAMES, f"no engine {name!r}") for name in found)
