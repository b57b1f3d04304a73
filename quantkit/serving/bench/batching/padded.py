"""A batch of requests, padded on the left and run by transformers' `generate` until the longest has ended.

A finished sequence goes on computing tokens that are discarded; a slot is free once the whole batch ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch import nn

from quantkit.serving.bench.batching.accounting import Replay, Served, Step
from quantkit.serving.bench.batching.trace import Request
from quantkit.serving.bench.generation import run
from quantkit.serving.engines.transformers import Clock


def next_batch(
    arrivals: Sequence[float], waiting: int, free: float, size: int, wait: float
) -> tuple[range, float]:
    """Return the members of the batch from request `waiting` on, and when it starts: once it is full, on a
    machine that is free from `free` on.

    arrivals: of all requests, in order. wait: seconds that the first member of a dynamic batch waits for
    company. A static batch waits for ever; its last one has the requests that are left.
    """
    patience = max(free, arrivals[waiting] + wait)
    members = range(waiting, min(waiting + size, bisect_right(arrivals, patience)))
    full = len(members) == size or patience == math.inf
    return members, max(free, arrivals[members[-1]]) if full else patience


def serve(
    model: nn.Module,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    size: int,
    wait: float,
    clock: Clock,
) -> Replay:
    """Serve batch after batch until no request waits. requests: in order of arrival. size, wait: see
    `next_batch`."""
    arrivals = [request.arrival for request in requests]
    free, served, steps = 0.0, [], []
    while len(served) < len(requests):
        places, start = next_batch(arrivals, len(served), free, size, wait)
        members = [requests[place] for place in places]
        longest = max(request.output for request in members)
        written, seconds, _ = run(model, [prompts[place] for place in places], longest, clock)
        answers, passes = account(members, start, seconds, written)
        served += answers
        steps += passes
        free = steps[-1].end
    return Replay(tuple(served), tuple(steps))


def account(
    requests: Sequence[Request], start: float, seconds: Sequence[float], written: Sequence[Sequence[int]]
) -> tuple[list[Served], list[Step]]:
    """Return the answers and steps of one batch, started at `start`, of which each token took `seconds`.

    An answer is handed back with the whole batch, as `generate` does; its first token was there before. The
    cache has a slot a position for every member, padding and finished ones included.
    """
    size, width = len(requests), max(request.prompt for request in requests)
    clock, steps = start, []
    for made, took in enumerate(seconds):  # tokens that each member has before this step
        clock += took
        live = [request for request in requests if request.output > made]
        used = sum(request.prompt + made for request in live)
        prefill = made == 0
        steps.append(
            Step(
                end=clock,
                seconds=took,
                prompt_slots=size * width if prefill else 0,
                prompt_tokens=used if prefill else 0,
                sequences=0 if prefill else size,
                finished=0 if prefill else size - len(live),
                used=used,
                reserved=size * (width + made),
            )
        )
    served = [
        Served(request.arrival, start + seconds[0], clock, tuple(row[: request.output]))
        for request, row in zip(requests, written, strict=True)
    ]
    return served, steps
