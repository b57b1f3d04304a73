"""Dynamic batching: a batch is started when it is full, or its first request has waited long enough."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quantkit.serving.bench.batching.padded import Batch


def next_batch(arrivals: Sequence[float], waiting: int, free: float, size: int, wait: float) -> Batch:
    """The batch after those before `waiting`, on a machine that is free from `free` on.

    wait: seconds that the first of them may wait for company. Whoever came while the machine was busy is in.
    """
    patience = max(free, arrivals[waiting] + wait)
    come = bisect_right(arrivals, patience)
    members = range(waiting, min(waiting + size, come))
    full = len(members) == size
    return Batch(tuple(members), max(free, arrivals[members[-1]]) if full else patience)
