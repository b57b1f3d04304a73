"""What is asked of attention: which implementations, at which lengths."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import USAGE, QuantkitError, name_all
from quantkit.serving.bench.settings import require_numbers

LONGEST = 4096  # tokens of the longest prompt, unless asked for: a CPU should be done in minutes
STEPS_DOWN = 4  # default lengths: halves of halves of the longest


@dataclass(frozen=True)
class Settings:
    """lengths: tokens of the prompts; () for halves of the longest that the model was made for. beyond:
    longer ones are wanted. steps: tokens decoded after each. limit: seconds one prefill may be expected to
    take."""

    implementations: tuple[str, ...] = ("eager", "sdpa", "flash_attention_2")
    lengths: tuple[int, ...] = ()
    steps: int = 8
    batch: int = 1
    repeats: int = 3
    beyond: bool = False
    limit: float = 120.0
    seed: int = 0

    def check(self) -> None:
        """Raise QuantkitError (exit code 2) for values that make no sense."""
        if not self.implementations:
            raise QuantkitError("--attn names no implementation", "try --attn eager,sdpa", USAGE)
        require_numbers(
            ("--tokens", self.steps, 1), ("--batch", self.batch, 1), ("--repeats", self.repeats, 1),
            ("--prompt", self.lengths, 1),
        )  # fmt: skip

    def plan(self, context: int | None) -> list[int]:
        """The lengths to measure, the shortest first; prompt and decoded tokens together fit `context`.

        Raises QuantkitError (exit code 2) for lengths beyond it that were not asked to be.
        """
        longest = max(1, (context or LONGEST) - self.steps)
        if not self.lengths:
            top = min(longest, LONGEST)
            rounded = 1 << (top.bit_length() - 1)
            shorter = {rounded >> k for k in range(0 if rounded < top else 1, STEPS_DOWN)}
            return sorted({top} | {length for length in shorter if length})
        found = sorted(set(self.lengths))
        if (over := [n for n in found if n > longest]) and context is not None and not self.beyond:
            raise QuantkitError(
                f"prompts of {name_all(map(str, over))} and {self.steps} decoded tokens are longer than the "
                f"model's context of {context}",
                f"choose {longest} or less, or add --beyond: its speed is real, its text is not",
                USAGE,
            )
        return found
