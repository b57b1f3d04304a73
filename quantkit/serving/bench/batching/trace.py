"""Requests with their times of arrival, drawn from a seed.

Arrivals are a Poisson process: the gaps between them are exponential. Prompt lengths are uniform, answer
lengths exponential. Each of the three has its own random stream: changing the rate changes only the times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.serving.bench.settings import BatchingSettings


@dataclass(frozen=True)
class TraceRequest:
    """One request. arrival: seconds after the first request's. prompt, output: numbers of tokens."""

    arrival: float
    prompt: int
    output: int


def sample(settings: BatchingSettings, context: int | None) -> tuple[TraceRequest, ...]:
    """Return random requests by the flags, whose rate and lengths are means. context: most tokens of a
    request; prompts take at most half of it."""
    streams = ("arrivals", "prompts", "outputs")
    gaps, prompts, outputs = (random.Random(f"{settings.seed} {stream}") for stream in streams)
    arrival, requests = 0.0, []
    for index in range(settings.requests):
        arrival += gaps.expovariate(settings.rate) if index else 0.0
        prompt = prompts.randint(1, 2 * settings.prompt_tokens - 1)
        output = max(1, round(outputs.expovariate(1 / settings.tokens)))
        if context:
            prompt = max(1, min(prompt, context // 2))
            output = max(1, min(output, context - prompt))
        requests.append(TraceRequest(arrival, prompt, output))
    return tuple(requests)


def draw_prompts(requests: Sequence[TraceRequest], vocabulary: int, seed: int) -> list[list[int]]:
    """Return random token ids for each prompt. Cost depends only on their number, except in mixtures of
    experts: routers spread random tokens more evenly over experts than text."""
    stream = random.Random(f"{seed} tokens")
    return [[stream.randrange(vocabulary) for _ in range(request.prompt)] for request in requests]
