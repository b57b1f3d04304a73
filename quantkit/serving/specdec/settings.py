"""What is asked of a target and its drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError
from quantkit.serving.specdec.theory import MOST

LOOKUP = "prompt-lookup"  # as a draft: what the text so far goes on with, where it has been there before


@dataclass(frozen=True)
class Settings:
    """ks: tokens drafted at once, one after the other. tokens: new ones of each text, at most.

    temperature 0: the likeliest token, always. proof: sampled tokens that the χ² test is made of, at least;
    None for those that were measured.
    """

    ks: tuple[int, ...] = (1, 2, 4, 8)
    text: Path | None = None
    prompts: int = 8
    prompt_tokens: int = 64
    tokens: int = 64
    repeats: int = 3
    temperature: float = 0.0
    seed: int = 0
    proof: int | None = None

    def check(self) -> None:
        """Raise QuantkitError for values that make no sense."""
        least = {"--prompts": (self.prompts, 1), "--prompt-tokens": (self.prompt_tokens, 2)}
        least |= {"--tokens": (self.tokens, 4), "--repeats": (self.repeats, 1)}
        for flag, (value, low) in least.items():
            if value < low:
                raise QuantkitError(f"{flag} {value} makes no sense", f"choose {low} or more", USAGE)
        if not 0 <= self.temperature < float("inf"):
            raise QuantkitError(f"--temperature {self.temperature:g} makes no sense", "choose 0 to 2", USAGE)
        if self.proof is not None and not self.temperature:
            hint = "add --temperature 1, or leave it out: greedy text is compared token by token"
            raise QuantkitError("--proof is for sampling", hint, USAGE)
        if self.proof is not None and self.proof < 100:
            raise QuantkitError(f"--proof {self.proof} proves nothing", "choose 1000 or more", USAGE)


def parse_ks(text: str) -> tuple[int, ...]:
    """`1,2,4,8`, each once, in order. Raises QuantkitError for anything else."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise QuantkitError(
            f"--k {text!r} is no list of numbers", "for example --k 1,2,4,8", USAGE
        ) from error
    if not 1 <= found[0] <= found[-1] <= MOST:
        raise QuantkitError(f"--k {text} makes no sense", f"choose numbers from 1 to {MOST}", USAGE)
    return tuple(found)
