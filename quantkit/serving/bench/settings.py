"""The flags of `quantkit bench` and of its subcommands attention and batching."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.models.machine import processor
from quantkit.options import flag_of, option

MOST = 1 << 20  # maximum of numbers in flags
KEYS = {"prompt_tokens": "prompt", "implementations": "attn", "policies": "batching"}  # names in the JSON
LISTS = ("batch", "prompt_tokens")
LEAST = {"repeats": 1, "rounds": 1, "warmup": 0, "threads": 1, "requests": 1, "rate": 1e-6}


def usual_threads() -> int:
    """Return OMP_NUM_THREADS, else the number of cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else processor.cores()


@dataclass(frozen=True, order=True)
class Point:
    """`batch` sequences at once, each of `prompt` tokens."""

    batch: int
    prompt: int


@dataclass(frozen=True)
class Asked:
    """Flags of all three commands."""

    least_tokens: ClassVar[int] = 1
    tokens: int = option(64, "New tokens of each sequence.", short="-n")
    seed: int = option(0, "Seed of the prompts.")
    repeats: int = option(3, "Number of measured runs.")
    threads: int | None = option(None, "CPU threads. (default: OMP_NUM_THREADS, else all cores)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision in transformers. auto: the checkpoint's own if the hardware supports it."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")

    def check(self) -> None:
        """Raise QuantkitError (exit code 2) for values that are invalid for every model."""
        for name, least in {**dict.fromkeys(LISTS, 1), "tokens": self.least_tokens, **LEAST}.items():
            if (value := getattr(self, name, None)) is not None:
                require_numbers((flag_of(name), self.numbers(name) if name in LISTS else value, least))

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a flag such as `1,4,16`, sorted, each once. Raises QuantkitError."""
        text = str(getattr(self, name))
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts or not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
            hint = f"separate them by commas: {flag_of(name)} 1,4,16"
            raise QuantkitError(f"{flag_of(name)} {text!r} is not a list of numbers", hint, USAGE)
        return tuple(sorted({int(part) for part in parts}))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the words of a flag such as `eager,sdpa`, each once. Raises QuantkitError if empty."""
        found = tuple(dict.fromkeys(filter(None, (part.strip() for part in getattr(self, name).split(",")))))
        if not found:
            raise QuantkitError(f"{flag_of(name)} names nothing", "see --help", USAGE)
        return found

    @property
    def cores(self) -> int:
        """Return the number of CPU threads to compute with."""
        return self.threads or usual_threads()

    def record(self) -> dict[str, Any]:
        """Return the settings as values that JSON can store."""
        names = [row.name for row in fields(self) if row.metadata and row.name != "quality"]
        found = {KEYS.get(name, name): getattr(self, name) for name in names} | {"threads": self.cores}
        lists = [name for name in ("batch", "prompt_tokens") if getattr(self, name) is not None]
        return found | {KEYS.get(name, name): self.numbers(name) for name in lists}


@dataclass(frozen=True)
class Settings(Asked):
    """Flags of `quantkit bench`.

    Every point is run `warmup` times unmeasured and `repeats` times measured, in each of `rounds`.
    """

    least_tokens: ClassVar[int] = 2  # the prefill makes the first; latency needs another
    batch: str = option("1", "Sequences at once: a number, or several separated by commas, such as 1,4,16.")
    prompt_tokens: str = option(
        "128", "Tokens of each prompt: a number, or several separated by commas, such as 128,512."
    )
    repeats: int = option(3, "Measured runs in each round.")
    rounds: int = option(2, "Rounds: in each, every model runs once, in a new process.")
    warmup: int = option(1, "Unmeasured runs before the measured runs of a round.")
    engine: str = option(
        "auto",
        "transformers or llama.cpp, or both separated by a comma. auto: llama.cpp for GGUF files if "
        "installed, else transformers.",
    )
    decoded: bool = option(
        False, "In transformers, compute with decoded weights instead of the layout's own kernels."
    )
    quality: tuple[str, ...] = option(
        (),
        "Result of quantkit eval --json, whose KL divergence and perplexity are shown next to the speed. "
        "Repeatable.",
    )
    trust_remote_code: bool = False

    @property
    def points(self) -> list[Point]:
        """Return every pair of batch size and prompt length; short prompts first."""
        prompts, batches = self.numbers("prompt_tokens"), self.numbers("batch")
        return [Point(batch, prompt) for prompt in prompts for batch in batches]


@dataclass(frozen=True)
class Attention(Asked):
    """Flags of `quantkit bench attention`."""

    implementations: str = option(
        "eager,sdpa" + ",flash_attention_2" * bool(find_spec("flash_attn")),
        "Attention implementations by their names in transformers, separated by commas.",
    )
    prompt_tokens: str | None = option(
        None, "Prompt lengths, such as 256,1024. (default: 256,512,1024,2048,4096 within the model's context)"
    )
    batch: int = option(1, "Prompts at once.")
    tokens: int = option(8, "New tokens after each prompt.", short="-n")


@dataclass(frozen=True)
class Batching(Asked):
    """Flags of `quantkit bench batching`."""

    policies: str = option(
        "static,dynamic,continuous",
        "Ways of batching, separated by commas. static: wait for a full batch. dynamic: wait 0.25 seconds at "
        "most. continuous: requests join and leave at every step.",
    )
    requests: int = option(32, "Number of requests.")
    rate: float = option(8.0, "Requests a second, on average; they arrive at random.")
    batch: int = option(8, "Sequences at once, at most.")
    prompt_tokens: int = option(64, "Tokens of a prompt, on average.")
    tokens: int = option(32, "Tokens of an answer, on average.", short="-n")
    repeats: int = option(3, "Number of measured rounds.")


def require_numbers(*rows: tuple[str, float | tuple[float, ...] | None, float]) -> None:
    """Raise QuantkitError (exit code 2) for a number below its least value or above MOST. rows: (name of the
    flag; a number, several, or None; least value)."""
    for name, values, least in rows:
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and not least <= value <= MOST:
                raise QuantkitError(f"{name} {value} is invalid", f"choose {least} or more", USAGE)
