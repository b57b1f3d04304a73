"""Costs of batching, counted: padding, idle steps, key-value slots reserved and used, latencies.

Pure numbers; every strategy gives the same kinds of events, so one arithmetic compares them. Shares of a
paged cache that are really used: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180), figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Step:
    """One forward pass.

    end: on the virtual clock. seconds: duration. prompt_slots: computed positions of prompts, padding
    included; prompt_tokens: tokens among them. sequences: in decoding; finished: those with all their tokens
    already. used, reserved: token slots of the key-value cache after the step: with a token of an unfinished
    request, and taken by any tensor or block.
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
    """A request: when it came, when its first token and its whole answer were there; its tokens."""

    arrival: float
    first: float
    done: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """A trace served by one strategy; requests in the trace's order."""

    requests: tuple[Served, ...]
    steps: tuple[Step, ...]


def figures(replay: Replay) -> dict[str, Any]:
    """Return the figures of a replay with at least one request: seconds, shares of one, and token slots
    averaged over the time that was computed."""
    requests, steps = replay.requests, replay.steps
    start = min(request.arrival for request in requests)
    seconds = max(request.done for request in requests) - start
    computed = sum(step.seconds for step in steps)
    slots = sum(step.prompt_slots for step in steps)
    decoded = sum(step.sequences for step in steps)

    def spread(values: Sequence[float]) -> dict[str, float]:
        found = np.percentile(values, PERCENTILES).tolist()
        return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}

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
