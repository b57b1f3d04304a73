"""One answer of a model: what it said, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantkit.evaluation.sampling import Sampling

Prompt = Sequence[Mapping[str, str]] | str  # messages for the chat template, or text to go on from
Stream = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """What runs. engine: with its version; kernels: what multiplies by weights. context: tokens at most."""

    source: str
    engine: str
    kernels: str
    device: str
    dtype: str
    context: int
    weight_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """prompt_tokens: of the whole conversation; of these `cached_tokens` were there from the turns before and
    `prefilled_tokens` went through the model. dropped_tokens: cached ones that this conversation no longer
    begins with. decode_seconds: from the first new token to the last of `generated_tokens`.
    stop: end, length (what was asked for), context (it is full) or interrupted. kv_bytes: of the cache, None
    where it is not known."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    dropped_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stop: str
    kv_bytes: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt per second."""
        return self.prefilled_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second after the first, which comes with the prefill; None of a single one."""
        later = self.generated_tokens - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "stop": self.stop,
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "prefilled": self.prefilled_tokens,
                "dropped": self.dropped_tokens,
                "generated": self.generated_tokens,
            },
            "seconds": {"prefill": self.prefill_seconds, "decode": self.decode_seconds},
            "tokens_per_second": {"prefill": self.prefill_rate, "decode": self.decode_rate},
        }


class Engine(Protocol):
    """A loaded model that answers, and keeps what it has seen."""

    facts: Facts

    def answer(
        self, prompt: Prompt, sampling: Sampling, stream: Stream, stopped: Callable[[], bool]
    ) -> Answer:
        """Answer, handing text on as it comes, until `stopped()`.

        Raises ContextFullError before anything is computed, and QuantkitError for a prompt that does not fit
        the chat template.
        """

    def forget(self) -> None:
        """Free the cache."""

    def close(self) -> None:
        """Free the model."""
