"""The flags of `quantkit specdec`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import check_value, option, text_column
from quantkit.serving.bench.settings import require_numbers

LOOKUP = "prompt-lookup"  # drafts the tokens that followed the last ones earlier in the text
MOST = 64  # maximum of tokens drafted at once


@dataclass(frozen=True)
class Settings:
    """Flags of `quantkit specdec`."""

    k: str = option("1,2,4,8", "Numbers of tokens to draft for each pass of the target, separated by commas.")
    prompt_text: Path | None = option(
        None, "File from which the prompts are cut, as --calibration takes it. (default: the shipped text)"
    )
    text_column: str = text_column()
    prompts: int = option(8, "Number of prompts.")
    prompt_tokens: int = option(64, "Tokens of each prompt.")
    tokens: int = option(64, "New tokens after each prompt, at most.", short="-n")
    repeats: int = option(3, "Runs for each prompt and each number of --k; the median counts.")
    temperature: float = option(0.0, "0: always the most likely token. Above: sample; higher is more random.")
    seed: int = option(0, "Seed of prompts and sampling.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of all models. auto: the target's own if the hardware supports it."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    threads: int | None = option(None, "CPU threads. (default: all cores)")

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of --k, sorted, each once. Raises QuantkitError for an invalid list."""
        try:
            found = tuple(sorted({int(part) for part in self.k.split(",")}))
        except ValueError as error:
            hint = "for example --k 1,2,4,8"
            raise QuantkitError(f"--k {self.k!r} is not a list of numbers", hint, USAGE) from error
        check_value("--k", self.k, 1 <= found[0] <= found[-1] <= MOST, f"choose numbers from 1 to {MOST}")
        return found

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        require_numbers(
            ("--prompts", self.prompts, 1), ("--prompt-tokens", self.prompt_tokens, 2),
            ("--tokens", self.tokens, 4), ("--repeats", self.repeats, 1),
        )  # fmt: skip
        check_value("--temperature", self.temperature, 0 <= self.temperature < math.inf, "choose 0 to 2")
