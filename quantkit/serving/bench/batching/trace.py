"""Requests with their times of arrival, drawn from a seed; their answers; and what answering them cost.

Arrivals are a Poisson process: the gaps between them are exponential. Prompt lengths are uniform, answer
lengths exponential. Each of the three has its own random stream: changing the rate changes only the times.

All strategies record the same steps, from which `figures` computes padding, idle sequences and the share of
the KV cache that is used (Kwon et al. 2023, PagedAttention, arXiv:2309.06180, figure 2).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.serving.bench.settings import BatchingSettings

Prompts = Sequence[Sequence[int]]  # token ids


@dataclass(frozen=True)
class TraceRequest:
    """One request. arrival: seconds after the first request's. prompt, output: numbers of tokens."""

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Served:
    """An answered request. Its arrival, first token and end: in seconds on the virtual clock. tokens: ids."""

    arrival: float
    first: float
    done: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BatchStep:
    """One forward pass.

    prompt_slots: computed positions of prompts, padding included. prompt_tokens: computed prompt tokens.
    sequences: number that decode. finished: how many of these have all their tokens already. used: slots of
    the KV cache after the step that hold a token of an unfinished request. reserved: allocated slots.
    """

    seconds: float
    prompt_slots: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    finished: int = 0
    used: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Replay:
    """A trace served by one strategy. requests: in the trace's order. steps: in the order of time."""

    requests: Sequence[Served]
    steps: Sequence[BatchStep]


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


def figures(replay: Replay) -> dict[str, Any]:
    """Return the figures of a replay with at least one request. Times are seconds; padded, idle and busy are
    shares from 0 to 1; used and reserved are token slots, averaged over the time of computation."""
    requests, steps = replay.requests, replay.steps
    seconds = max(request.done for request in requests) - min(request.arrival for request in requests)
    computed = sum(step.seconds for step in steps)
    slots = sum(step.prompt_slots for step in steps)
    decoded = sum(step.sequences for step in steps)
    return {
        "tokens_per_second": sum(len(request.tokens) for request in requests) / seconds,
        "requests_per_second": len(requests) / seconds,
        "latency": _percentiles([request.done - request.arrival for request in requests]),
        "first_token": _percentiles([request.first - request.arrival for request in requests]),
        "padded": 1 - sum(step.prompt_tokens for step in steps) / slots,
        "idle": sum(step.finished for step in steps) / decoded if decoded else 0.0,
        "used": sum(step.used * step.seconds for step in steps) / computed,
        "reserved": sum(step.reserved * step.seconds for step in steps) / computed,
        "busy": computed / seconds,
        "seconds": seconds,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99, linearly interpolated."""
    return dict(zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)).tolist(), strict=True))
