"""The flags of `quantkit bench`: points, engines, and the other modes (--attn, --batching, --url)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.models.machine import processor
from quantkit.options import option

MOST = 1 << 20  # of any number that a flag takes
MODELS, ATTN, BATCHING, URL = "models", "attn", "batching", "url"  # the modes
RUN = {"prompt", "tokens", "seed"}
LOCAL = RUN | {"batch", "repeats", "threads", "dtype", "device"}
FLAGS = {  # of each mode
    MODELS: LOCAL | {"rounds", "warmup", "engine", "decoded", "quality"},
    ATTN: LOCAL | {"attn"},
    BATCHING: LOCAL | {"batching", "requests", "rate"},
    URL: RUN | {"url", "concurrency", "requests", "served_model", "api_key", "remote"},
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of flags whose default depends on the mode
    MODELS: {"batch": "1", "prompt": "128", "tokens": 64},
    ATTN: {"batch": "1", "tokens": 8},
    BATCHING: {"batch": "8", "prompt": "64", "tokens": 32, "requests": 32, "rate": 8.0},
    URL: {"prompt": "128", "tokens": 64},
}
SINGLE = {ATTN: ("batch",), BATCHING: ("batch", "prompt"), URL: ("prompt",)}  # lists of one number
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
class Settings:
    """None stands for the default of the mode; `resolve` fills it in.

    Every point is run `warmup` times unmeasured and `repeats` times measured, in each of `rounds`.
    """

    batch: str | None = option(None, "Sequences at once, such as 1,4,16. (default: 1, of --batching: 8)")
    prompt: str | None = option(
        None,
        "Prompt tokens of each, of --url words, such as 128,512. (default: 128; of --attn: up to 4096; of "
        "--batching: 64 on average)",
    )
    tokens: int | None = option(
        None,
        "New tokens of each sequence. (default: 64; of --attn: 8; of --batching: 32 on average)",
        short="-n",
    )
    repeats: int = option(3, "Measured runs in a round.")
    rounds: int = option(2, "Turns of every model, each in a new process.")
    warmup: int = option(1, "Unmeasured runs before the measured ones.")
    seed: int = option(0, "Seed of the prompts.")
    engine: str = option(
        "auto",
        "auto, transformers or llama.cpp, or several. auto: llama.cpp for GGUF files where it is installed, "
        "else transformers.",
    )
    decoded: bool = option(
        False, "In transformers, compute with decoded weights, not with the layout's own kernels."
    )
    threads: int | None = option(
        None, "CPU threads of every engine. (default: OMP_NUM_THREADS, else the cores)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision in transformers. auto: each checkpoint's own where the hardware has it."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps. auto: cuda where there is one.")
    quality: tuple[str, ...] = option(
        (), "File of quantkit eval --json: KL divergence and perplexity next to the speed. Repeatable."
    )
    attn: str | None = option(
        None,
        "Time and memory of one model's attention at growing prompts, instead: eager, sdpa, "
        "flash_attention_2 …",
    )
    batching: str | None = option(
        None, "One model serving random requests, instead: static, dynamic, continuous."
    )
    url: str | None = option(None, "An OpenAI endpoint under load, instead.")
    concurrency: str | None = option(None, "Users of --url, level by level. (default: 1,2,4,8,16,32)")
    requests: int | None = option(
        None, "Requests of --batching (default: 32), or of each level of --url (default: 4 a user)."
    )
    rate: float | None = option(None, "Requests of --batching a second, on average. (default: 8)")
    served_model: str | None = option(None, "Name of the model of --url.")
    api_key: str | None = field(
        default=None, repr=False, metadata={"help": "API key of --url.", "short": None, "names": ()}
    )
    remote: bool = option(False, "Allow a --url on another machine.")
    trust_remote_code: bool = False

    @property
    def mode(self) -> str:
        """MODELS, ATTN, BATCHING or URL."""
        return next((name for name in (ATTN, BATCHING, URL) if getattr(self, name) is not None), MODELS)

    @property
    def points(self) -> list[Point]:
        """Every batch with every prompt length; short prompts first."""
        return [Point(batch, prompt) for prompt in self.numbers("prompt") for batch in self.numbers("batch")]

    @property
    def cores(self) -> int:
        """Threads that compute."""
        return self.threads or usual_threads()

    def resolve(self) -> Settings:
        """Return the settings with the defaults of their mode.

        Raises QuantkitError (exit code 2) for values that make no sense and for flags of another mode.
        """
        self._refuse_others()
        defaults = DEFAULTS[self.mode].items()
        made = replace(self, **{name: value for name, value in defaults if getattr(self, name) is None})
        for name in ("batch", "prompt", "concurrency"):
            if getattr(made, name) is not None:
                single = name in SINGLE.get(self.mode, ())
                require_numbers((f"--{name}", made.number(name) if single else made.numbers(name), 1))
        tokens = 2 if self.mode == MODELS else 1  # the first is the prefill's: latency needs another
        least = {"tokens": tokens, **LEAST}
        require_numbers(*((f"--{name}", getattr(made, name), value) for name, value in least.items()))
        return made

    def _refuse_others(self) -> None:
        own, others = FLAGS[self.mode], (ATTN, BATCHING, URL)
        if sum(getattr(self, name) is not None for name in others) > 1:
            hint = "choose one of them"
            raise QuantkitError("--attn, --batching and --url exclude each other", hint, USAGE)
        for row in fields(self):
            name = f"--{row.name.replace('_', '-')}"
            if not row.metadata or row.name in own or getattr(self, row.name) == row.default:
                continue
            if self.mode != MODELS:
                hint = f"leave it out of --{self.mode}"
                raise QuantkitError(f"{name} is not for --{self.mode}", hint, USAGE)
            users = " and ".join(f"--{other}" for other in others if row.name in FLAGS[other])
            raise QuantkitError(f"{name} is for {users}", f"add one, or leave out {name}", USAGE)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a flag such as `1,4,16` as numbers, each once, in order of size. Raises QuantkitError."""
        text = getattr(self, name)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts or not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
            hint = f"separate them by commas: --{name} 1,4,16"
            raise QuantkitError(f"--{name} {text!r} is not a list of numbers", hint, USAGE)
        return tuple(sorted({int(part) for part in parts}))

    def number(self, name: str) -> int:
        """Return the one number of a flag. Raises QuantkitError for a list."""
        first, *more = self.numbers(name)
        if more:
            hint = f"choose --{name} {first}"
            raise QuantkitError(f"--{name} {getattr(self, name)}: give one number", hint, USAGE)
        return first

    def names(self, name: str) -> tuple[str, ...]:
        """Return the words of a flag such as `eager,sdpa`, each once. Raises QuantkitError for none."""
        found = tuple(dict.fromkeys(filter(None, (part.strip() for part in getattr(self, name).split(",")))))
        if not found:
            raise QuantkitError(f"--{name} names nothing", "see quantkit bench --help", USAGE)
        return found

    def record(self) -> dict[str, Any]:
        """Return the settings of the mode as JSON takes them."""
        parsed = {name: self.numbers(name) for name in ("batch", "prompt") if getattr(self, name)}
        parsed["threads"] = self.cores
        names = (row.name for row in fields(self) if row.name in FLAGS[self.mode] - {"quality"})
        return {name: parsed.get(name, getattr(self, name)) for name in names}


def require_numbers(*rows: tuple[str, float | tuple[float, ...] | None, float]) -> None:
    """Raise QuantkitError (exit code 2) for a value, or one of several, that is less than the least, or
    beyond MOST. rows: (name, value, values or None, least)."""
    for name, values, least in rows:
        for value in values if isinstance(values, tuple) else (values,):
            if value is not None and not least <= value <= MOST:
                raise QuantkitError(f"{name} {value} makes no sense", f"choose {least} or more", USAGE)
