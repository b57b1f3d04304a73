"""The flags of `quantkit specdec`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import check_value, flag_of, option, text_column
from quantkit.serving.engines import LocalOptions

LOOKUP = "prompt-lookup"  # drafts the tokens that followed the last ones earlier in the text
MOST = 64  # maximum of tokens drafted at once
LEAST = {"prompts": 1, "prompt_tokens": 2, "tokens": 4, "repeats": 1}


@dataclass(frozen=True)
class SpecdecSettings(LocalOptions):
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

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of --k, sorted, each once. Raises QuantkitError for an invalid list."""
        try:
            numbers = tuple(sorted({int(part) for part in self.k.split(",")}))
        except ValueError as error:
            hint = "for example --k 1,2,4,8"
            raise QuantkitError(f"--k {self.k!r} is not a list of numbers", hint, USAGE) from error
        check_value("--k", self.k, 1 <= numbers[0] <= numbers[-1] <= MOST, f"choose numbers from 1 to {MOST}")
        return numbers

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        for name, least in LEAST.items():
            check_value(
                flag_of(name), value := getattr(self, name), value >= least, f"choose {least} or more"
            )
        check_value("--temperature", self.temperature, 0 <= self.temperature < math.inf, "choose 0 to 2")
