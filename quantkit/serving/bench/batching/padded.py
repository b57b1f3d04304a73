"""A batch of requests, padded on the left and run by transformers' `generate` until the longest has ended.

That is what a batch is without continuous batching: who has all tokens goes on computing some that nobody
reads, and a slot is free when the whole batch is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantkit.serving.bench.batching.accounting import Replay, Served, Step
from quantkit.serving.bench.batching.trace import Request
from quantkit.serving.bench.generation import run
from quantkit.serving.bench.machine import Clock


@dataclass(frozen=True)
class Batch:
    """Members by their place in the trace, and when they are started together."""

    members: tuple[int, ...]
    start: float


def next_batch(arrivals: Sequence[float], waiting: int, free: float, size: int, wait: float) -> Batch:
    """The batch after those before `waiting`, on a machine that is free from `free` on; it starts when it is
    full.

    arrivals: of all requests, in order. wait: seconds that the first of them may wait for company: a dynamic
    batch. Without end the batch is static, and the last one is what is left when nobody comes any more.
    """
    patience = max(free, arrivals[waiting] + wait)
    members = range(waiting, min(waiting + size, bisect_right(arrivals, patience)))
    full = len(members) == size or patience == math.inf
    return Batch(tuple(members), max(free, arrivals[members[-1]]) if full else patience)


def serve(
    model: nn.Module,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    size: int,
    wait: float,
    clock: Clock,
) -> Replay:
    """Batch after batch until nobody waits. requests: by time of arrival. size, wait: of `next_batch`."""
    arrivals = [request.arrival for request in requests]
    free, served, steps = 0.0, [], []
    while len(served) < len(requests):
        batch = next_batch(arrivals, len(served), free, size, wait)
        members = [requests[index] for index in batch.members]
        longest = max(request.output for request in members)
        written, seconds, _ = run(model, [prompts[index] for index in batch.members], longest, clock)
        answers, passes = account(members, batch.start, seconds, written)
        served += answers
        steps += passes
        free = steps[-1].end
    return Replay(tuple(served), tuple(steps))


def account(
    requests: Sequence[Request], start: float, seconds: Sequence[float], written: Sequence[Sequence[int]]
) -> tuple[list[Served], list[Step]]:
    """Answers and steps of one batch that was started at `start` and whose tokens took `seconds`.

    An answer is handed back with the whole batch, as `generate` does; its first token was there before. The
    cache holds a slot a position for every member, padding and finished ones too; a cache of fixed size would
    reserve them all at the start.
    """
    size, width = len(requests), max(request.prompt for request in requests)
    longest, clock, steps = max(request.output for request in requests), start, []
    reserved = size * (width + longest - 1)  # what was written last is never read again
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
                held=size * (width + made),
                reserved=reserved,
            )
        )
    served = [
        Served(request.arrival, start + seconds[0], clock, tuple(row[: request.output]))
        for request, row in zip(requests, written, strict=True)
    ]
    return served, steps
