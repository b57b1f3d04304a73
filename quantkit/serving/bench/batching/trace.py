"""Requests with their times of arrival, drawn from a seed.

Arrivals are a Poisson process: the gaps between them are exponential. Prompt lengths are uniform, answer
lengths exponential. Each of the three has its own random stream: changing the rate changes only the times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from quantkit.serving.bench.settings import Batching


@dataclass(frozen=True)
class Request:
    """One request. arrival: seconds after the first request's. prompt, output: numbers of tokens."""

    arrival: float
    prompt: int
    output: int


def sample(settings: Batching, context: int | None) -> tuple[Request, ...]:
    """Return random requests by the flags, whose rate and lengths are means. context: most tokens of a
    request; prompts take at most half of it."""
    prompt, seed = settings.prompt_tokens, settings.seed
    gaps, prompts, outputs = (random.Random(f"{seed} {name}") for name in ("arrivals", "prompts", "outputs"))
    arrival, made = 0.0, []
    for index in range(settings.requests):
        arrival += gaps.expovariate(settings.rate) if index else 0.0
        length = prompts.randint(1, 2 * prompt - 1)
        answer = max(1, round(outputs.expovariate(1 / settings.tokens)))
        if context:
            length = max(1, min(length, context // 2))
            answer = max(1, min(answer, context - length))
        made.append(Request(arrival, length, answer))
    return tuple(made)
