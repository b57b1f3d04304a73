"""The flags of `quantkit specdec`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quantkit.evaluation.settings import check_temperature
from quantkit.options import check_value, option, text_column
from quantkit.serving.settings import LocalOptions
from quantkit.text.sources import opened

LOOKUP = "prompt-lookup"  # drafts the tokens that followed the last ones earlier in the text
MOST = 64  # maximum of tokens drafted at once


@dataclass(frozen=True)
class SpecdecSettings(LocalOptions):
    """Flags of `quantkit specdec`."""

    least: ClassVar[dict[str, float]] = {"k": 1, "prompts": 1, "prompt_tokens": 2, "tokens": 4, "repeats": 1}
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

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        super().check()
        if self.prompt_text:
            with opened(self.prompt_text, "--prompt-text", "check the path"):
                pass
        most = self.numbers("k")[-1]
        check_value("--k", most, most <= MOST, f"choose numbers from 1 to {MOST}")
        check_temperature(self.temperature)
