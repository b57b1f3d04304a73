"""What batching costs, counted: padding, idle steps, key-value slots held and used, latencies.

Pure numbers; every strategy gives the same kinds of events, so they are compared by one arithmetic. Shares
of a paged cache that is really used: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180), figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Step:
    """One forward pass.

    seconds: it took. prompt_slots: positions of prompts it computed, padding and all; prompt_tokens: of them,
    tokens. sequences: in decoding; finished: of them, those that had all their tokens already. used, held,
    reserved: token slots of the key-value cache, after it: with a token of an unfinished request in it;
    taken by any tensor or block; set aside at the start for what may come. end: on the virtual clock.
    """

    end: float
    seconds: float
    prompt_slots: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    finished: int = 0
    used: int = 0
    held: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Served:
    """A request: when it came, when its first token was there, when its answer was; what it says."""

    arrival: float
    first: float
    done: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """A trace gone through one strategy; requests in the trace's order."""

    requests: tuple[Served, ...]
    steps: tuple[Step, ...]


PERCENTILES = (50, 90, 99)


def figures(replay: Replay) -> dict[str, Any]:
    """What is said of a replay with at least one request. Seconds, shares of one, token slots averaged over
    the time that was computed.

    busy: share of the time from the first arrival to the last answer in which anything was computed.
    in_flight: unfinished sequences in a decoding step, on average.
    """
    requests, steps = replay.requests, replay.steps
    start = min(request.arrival for request in requests)
    seconds = max(request.done for request in requests) - start
    computed = sum(step.seconds for step in steps)
    slots = sum(step.prompt_slots for step in steps)
    decoded = sum(step.sequences for step in steps)
    idle = sum(step.finished for step in steps)
    decoding = sum(1 for step in steps if step.sequences)

    def average(field: str) -> float:
        return sum(getattr(step, field) * step.seconds for step in steps) / computed

    def spread(values: Sequence[float]) -> dict[str, float]:
        found = np.percentile(values, PERCENTILES).tolist()
        return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}

    return {
        "tokens_per_second": sum(len(request.tokens) for request in requests) / seconds,
        "requests_per_second": len(requests) / seconds,
        "latency": spread([request.done - request.arrival for request in requests]),
        "first_token": spread([request.first - request.arrival for request in requests]),
        "padded": 1 - sum(step.prompt_tokens for step in steps) / slots,
        "idle": idle / decoded if decoded else 0.0,
        "used": average("used"),
        "held": average("held"),
        "reserved": average("reserved"),
        "most_held": max(step.held for step in steps),
        "in_flight": (decoded - idle) / decoding if decoding else 0.0,
        "busy": computed / seconds,
        "seconds": seconds,
    }
