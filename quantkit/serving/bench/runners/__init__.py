"""The engines that are measured, one file each, found by its name: how it loads, prefills and decodes.

A file has `AT_ONCE`, the prompt tokens that the engine computes at a time; `prepare(job)`, which imports the
engine's libraries and returns torch's device or None, and the bytes of a decoded weight and of a value in the
cache; and `start(job)`, which loads the model and returns a `Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Protocol

from quantkit.serving.engines.choose import require_known

NAMES = ("auto", "transformers", "llama.cpp", "vllm")


@dataclass(frozen=True)
class Facts:
    """What runs. kernels: what multiplies by the weights; packed: whether these lie in memory as codes; note:
    why they do not. weight_bytes: as they lie in memory. dtype: in which the engine computes."""

    engine: str
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
    sequences together, in decode_seconds. step_seconds: from one token of a sequence to its next; empty where
    the engine does not tell. kv_bytes: of keys and values, None likewise.
    """

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    step_seconds: Sequence[float] = ()
    kv_bytes: int | None = None


class Runner(Protocol):
    """A loaded model."""

    facts: Facts

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        """Generate exactly `tokens` tokens after each of the prompts, which are of one length, greedily."""


def find(engine: str) -> ModuleType:
    """The file of an engine."""
    return import_module(f"{__name__}.{engine.replace('.', '')}")


def parse(text: str) -> tuple[str, ...]:
    """Names of engines, separated by commas. Raises QuantkitError for an unknown one."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for name in names or ("",):
        require_known(name, NAMES)
    return names
