"""Costs of batching: padding, idle steps, reserved and used slots of the KV cache, latencies.

All strategies record the same events, from which the same functions compute their costs. The share of the
cache that is used follows Kwon et al. 2023 (PagedAttention, arXiv:2309.06180), figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class BatchStep:
    """One forward pass.

    end: time of the virtual clock. seconds: duration. prompt_slots: computed positions of prompts, padding
    included. prompt_tokens: computed prompt tokens. sequences: number that decode. finished: how many of
    these have all their tokens already. used: slots of the KV cache after the step that hold a token of an
    unfinished request. reserved: slots that are allocated.
    """

    end: float
    seconds: float
    prompt_slots: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    finished: int = 0
    used: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Served:
    """An answered request. Its arrival, first token and end: in seconds on the virtual clock. tokens: ids."""

    arrival: float
    first: float
    done: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """A trace served by one strategy. requests: in the trace's order. steps: in the order of time."""

    requests: tuple[Served, ...]
    steps: tuple[BatchStep, ...]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99, linearly interpolated."""
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}


def figures(replay: Replay) -> dict[str, Any]:
    """Return the figures of a replay with at least one request. Times are seconds; padded, idle and busy are
    shares from 0 to 1; used and reserved are token slots, averaged over the time of computation."""
    requests, steps = replay.requests, replay.steps
    start = min(request.arrival for request in requests)
    seconds = max(request.done for request in requests) - start
    computed = sum(step.seconds for step in steps)
    slots = sum(step.prompt_slots for step in steps)
    decoded = sum(step.sequences for step in steps)

    return {
        "tokens_per_second": sum(len(request.tokens) for request in requests) / seconds,
        "requests_per_second": len(requests) / seconds,
        "latency": spread([request.done - request.arrival for request in requests]),
        "first_token": spread([request.first - request.arrival for request in requests]),
        "padded": 1 - sum(step.prompt_tokens for step in steps) / slots,
        "idle": sum(step.finished for step in steps) / decoded if decoded else 0.0,
        "used": sum(step.used * step.seconds for step in steps) / computed,
        "reserved": sum(step.reserved * step.seconds for step in steps) / computed,
        "busy": computed / seconds,
        "seconds": seconds,
    }
