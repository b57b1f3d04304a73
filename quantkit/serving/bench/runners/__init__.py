"""The engines that are measured, one file each, found by its name: how it loads, prefills and decodes.

A file has `AT_ONCE`, the prompt tokens that the engine computes at a time; `prepare(job)`, which imports the
engine's libraries and returns torch's device or None; and `start(job)`, which loads the model and returns a
`Runner`.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, util
from types import ModuleType
from typing import Protocol

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError
from quantkit.serving.bench.subjects import Subject

FILES = {  # the names of --engine, and their files
    "transformers": "transformers",
    "llama.cpp": "llamacpp",
    "llama-bench": "llama_bench",
    "vllm": "vllm",
}
NAMES = ("auto", *FILES)


@dataclass(frozen=True)
class Facts:
    """What runs. kernels: what multiplies by the weights; packed: whether these lie in memory as codes; note:
    why they do not. weight_bytes: as they lie in memory. dtype: in which the engine computes."""

    engine: str
    version: str
    kernels: str
    packed: bool
    note: str
    dtype: str
    attention: str | None
    weight_bytes: int


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
    step_seconds: Sequence[float]
    kv_bytes: int | None


class Runner(Protocol):
    """A loaded model."""

    facts: Facts

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        """Generate exactly `tokens` tokens after each of the prompts, which are of one length, greedily."""

    def close(self) -> None:
        """Free the model."""


def find(engine: str) -> ModuleType:
    """The file of an engine."""
    return import_module(f"{__name__}.{FILES[engine]}")


def parse(text: str) -> tuple[str, ...]:
    """Names of engines, separated by commas. Raises QuantkitError for an unknown one."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for name in names or ("",):
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise QuantkitError(f"no engine {name!r}", f"{meant}choose {', '.join(NAMES)}", USAGE)
    return names


def choose(asked: str, subject: Subject, decoded: bool = False) -> tuple[str, str]:
    """The engine for a checkpoint, and what to know about the choice. decoded: as --decoded says.

    Raises QuantkitError (exit code 4) where the engine that was asked for cannot run it, or is missing.
    """
    llama = (
        "llama.cpp" if util.find_spec("xllamacpp") else "llama-bench" if shutil.which("llama-bench") else ""
    )
    if asked == "auto":
        if subject.container != "gguf":
            return "transformers", ""
        if decoded:
            return "transformers", ""
        return (
            (llama, "") if llama else ("transformers", "llama.cpp is not installed (pip install xllamacpp)")
        )
    if asked in ("llama.cpp", "llama-bench") and subject.container != "gguf":
        raise QuantkitError(
            f"{asked} runs GGUF files, {subject.source} is none",
            "make one: quantkit gguf MODEL; or leave out --engine",
            UNSUPPORTED,
        )
    if asked == "llama.cpp" and not llama or asked == "llama-bench" and not shutil.which("llama-bench"):
        package = (
            "put llama.cpp's programs on the PATH" if asked == "llama-bench" else "pip install xllamacpp"
        )
        raise QuantkitError(f"{asked} is not installed", package, UNSUPPORTED)
    if asked == "llama.cpp" and llama == "llama-bench":
        return llama, "by llama-bench: xllamacpp is not installed"
    if asked == "vllm" and util.find_spec("vllm") is None:
        from quantkit.serving.engines import vllm

        raise QuantkitError(vllm.MISSING, vllm.HINT, UNSUPPORTED)
    return asked, ""
