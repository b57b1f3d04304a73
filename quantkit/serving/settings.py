"""Flags of the commands that run a model in their own process, and the checks of numbers and lists."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from quantkit.errors import USAGE, QuantkitError, one_of, require
from quantkit.models.machine import processor
from quantkit.options import check_value, flag_of, option

MOST = 1 << 20  # maximum of numbers in flags
Known = dict[str, tuple[str, tuple[str, ...]]]  # by option: beginning of the error for other names, names


@dataclass(frozen=True)
class LocalOptions:
    """Flags that all of these commands have. least: minimum of each number. known: names of each list."""

    least: ClassVar[dict[str, float]] = {}
    known: ClassVar[Known] = {}
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision in transformers. auto: the checkpoint's own if the hardware supports it."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    threads: int | None = option(None, "CPU threads. (default: OMP_NUM_THREADS, else all cores)")

    @property
    def cores(self) -> int:
        """Return the number of CPU threads to compute with."""
        return self.threads or processor.threads()

    def check(self) -> None:
        """Raise QuantkitError (exit code 2) for values that are invalid for every model."""
        for name, least in self.least.items():
            value = getattr(self, name, None)
            for number in self.numbers(name) if isinstance(value, str) else (value,):
                fits = number is None or least <= number <= MOST
                check_value(flag_of(name), number, fits, f"choose {least} or more")
        for name, (complaint, known) in self.known.items():
            for word in self.names(name):
                one_of(word, known, f"{complaint} {word!r}")

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a flag such as `1,4,16`, sorted, each once. Raises QuantkitError."""
        text = str(getattr(self, name))
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words or not all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
            hint = f"separate them by commas: {flag_of(name)} 1,4,16"
            raise QuantkitError(f"{flag_of(name)} {text!r} is not a list of numbers", hint, USAGE)
        return tuple(sorted(set(map(int, words))))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the words of a flag such as `eager,sdpa`, each once. Raises QuantkitError if empty."""
        words = tuple(dict.fromkeys(word.strip() for word in getattr(self, name).split(",") if word.strip()))
        require(words, f"{flag_of(name)} names nothing", "see --help", USAGE)
        return words
