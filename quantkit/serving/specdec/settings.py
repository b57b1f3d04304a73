"""What is asked of a target and its drafts: the flags of `quantkit specdec`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option

LOOKUP = "prompt-lookup"  # as a draft: what the text so far goes on with, where it has been there before
MOST = 64  # tokens drafted at once, that a best k is looked for up to


@dataclass(frozen=True)
class Settings:
    """temperature 0: the likeliest token, always."""

    k: str = option("1,2,4,8", "Tokens drafted for each pass: numbers, separated by commas.")
    text: Path | None = option(None, "Text that prompts are cut from. (default: shipped text)")
    prompts: int = option(8, "How many prompts.")
    prompt_tokens: int = option(64, "Tokens of each prompt.")
    tokens: int = option(64, "New tokens of each prompt, at most.", short="-n")
    repeats: int = option(3, "Of every run; the median counts.")
    temperature: float = option(0.0, "0: the likeliest token, always. Above: sample.")
    proof: int | None = option(
        None,
        "Draw at least so many tokens for the test of the distribution. (default: what is measured)",
    )
    seed: int = option(0, "Of prompts and sampling.")
    engine: Literal["auto", "transformers", "llama.cpp"] = option(
        "auto", "auto: llama.cpp where all are GGUF files and it is installed."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of all models. auto: the target's where the hardware has it."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto: cuda where there is one.")

    @property
    def ks(self) -> tuple[int, ...]:
        """Tokens drafted at once, each number once, in order. Raises QuantkitError for anything else."""
        try:
            found = sorted({int(part) for part in self.k.split(",")})
        except ValueError as error:
            hint = "for example --k 1,2,4,8"
            raise QuantkitError(f"--k {self.k!r} is no list of numbers", hint, USAGE) from error
        if not 1 <= found[0] <= found[-1] <= MOST:
            raise QuantkitError(f"--k {self.k} makes no sense", f"choose numbers from 1 to {MOST}", USAGE)
        return tuple(found)

    def check(self) -> None:
        """Raise QuantkitError for values that make no sense."""
        for name, low in {"prompts": 1, "prompt_tokens": 2, "tokens": 4, "repeats": 1}.items():
            if (value := getattr(self, name)) < low:
                flag = f"--{name.replace('_', '-')}"
                raise QuantkitError(f"{flag} {value} makes no sense", f"choose {low} or more", USAGE)
        if not 0 <= self.temperature < float("inf"):
            raise QuantkitError(f"--temperature {self.temperature:g} makes no sense", "choose 0 to 2", USAGE)
        if self.proof is not None and not self.temperature:
            hint = "add --temperature 1, or leave it out: greedy text is compared token by token"
            raise QuantkitError("--proof is for sampling", hint, USAGE)
        if self.proof is not None and self.proof < 100:
            raise QuantkitError(f"--proof {self.proof} proves nothing", "choose 1000 or more", USAGE)
