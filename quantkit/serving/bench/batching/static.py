"""Static batching: a batch is started when it is full."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.serving.bench.batching.padded import Batch


def next_batch(arrivals: Sequence[float], waiting: int, free: float, size: int, wait: float = 0.0) -> Batch:
    """The batch after those before `waiting`, on a machine that is free from `free` on.

    arrivals: of all requests, in order. The last batch is what is left when nobody comes any more.
    """
    members = range(waiting, min(waiting + size, len(arrivals)))
    return Batch(tuple(members), max(free, arrivals[members[-1]]))
