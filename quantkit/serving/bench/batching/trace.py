"""Requests with their times of arrival, drawn from a seed.

Arrivals are a Poisson process: the gaps between them are exponential. Prompts are uniform, answers
exponential around their mean. Each has a stream of its own, so another rate brings the same requests at other
times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from quantkit.serving.bench.settings import Batching


@dataclass(frozen=True)
class Request:
    """arrival: seconds after the first one's. prompt, output: tokens."""

    arrival: float
    prompt: int
    output: int


def sample(settings: Batching, context: int | None) -> tuple[Request, ...]:
    """Return --requests at --rate a second, of --prompt-tokens and --tokens, all on average. Prompts take
    at most half of `context`, answers the rest."""
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
