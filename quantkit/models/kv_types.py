"""Precisions of a key/value cache, by name: bytes of a value including scales, and engines that support it.

Shared by `eval`, `auto`, `plan`, `serve`, `chat` and `bench`. How each rounds: `evaluation/kv_cache.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from quantkit.errors import UNSUPPORTED, one_of, require
from quantkit.options import DTYPES

GROUP = 64  # values of transformers' quantized cache that share a scale and a shift of 16 bit each
BLOCK = 32  # values of llama.cpp's types that share a 16-bit scale


@dataclass(frozen=True)
class KvType:
    """A precision. nbytes: bytes of a value including its share of scales. keeper: the engine whose rounding
    `eval` applies. llamacpp, vllm: the engines' own names; None if unsupported."""

    nbytes: Fraction
    keeper: str
    llamacpp: str | None = None
    vllm: str | None = None


TYPES = {
    "float32": KvType(Fraction(4), "any engine", "f32"),
    "bfloat16": KvType(Fraction(2), "any engine", "bf16", "bfloat16"),
    "float16": KvType(Fraction(2), "any engine", "f16", "float16"),
    "fp8": KvType(Fraction(1), "vLLM", vllm="fp8"),  # a scale per tensor, 1 unless it is calibrated
    "int8": KvType(Fraction(GROUP * 8 + 32, GROUP * 8), "transformers, HQQ"),
    "q8_0": KvType(Fraction(BLOCK + 2, BLOCK), "llama.cpp", "q8_0"),
    "q4_0": KvType(Fraction(BLOCK // 2 + 2, BLOCK), "llama.cpp", "q4_0"),
    "int4": KvType(Fraction(GROUP * 4 + 32, GROUP * 8), "transformers, quanto"),
}
ALIASES = DTYPES | {"float8": "fp8", "fp8_e4m3": "fp8", "auto": "bfloat16"}


def named(text: str, by: Callable[[KvType], Any] = bool) -> str:
    """Return the precision that the user typed. For an unknown name, the QuantkitError lists those for which
    `by` is true."""
    name = ALIASES.get(text.lower(), text.lower())
    listed = [other for other, kind in TYPES.items() if by(kind)]
    what = f"no precision of a key/value cache is called {text!r}"
    return name if name in TYPES else one_of(name, listed, what, ALIASES)


def fits(config: Any, name: str) -> bool:
    """Return whether llama.cpp keeps a cache of type `name` for heads as wide as the configuration says; True
    for types of other engines."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else BLOCK)
    return TYPES[name].keeper != "llama.cpp" or width % BLOCK == 0


def in_engine(engine: str, name: str) -> str:
    """Return the name by which `llama.cpp` or `vLLM` calls a precision. Raises QuantkitError (exit code 4) if
    it does not have the precision."""
    names = {other: getattr(kind, engine.lower().replace(".", "")) for other, kind in TYPES.items()}
    hint = f"choose one of {', '.join(other for other in names if names[other])}"
    require(names[name], f"--kv-dtype {name}: {engine} has no such cache", hint, UNSUPPORTED)
    return names[name]


in_llamacpp = partial(named, by=lambda kind: kind.llamacpp)
served = partial(named, by=lambda kind: kind.llamacpp or kind.vllm)
measured = partial(named, by=lambda kind: not kind.keeper.startswith("transformers"))
