"""Static and dynamic batching: a batch, padded on the left, runs until its longest answer has ended.

transformers' `generate` runs it. Finished sequences go on computing tokens, which are discarded. New requests
start when the whole batch has ended.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch import nn

from quantkit.serving.bench.batching.trace import BatchStep, Prompts, Replay, Served, TraceRequest
from quantkit.serving.engines.transformers import continue_batch


def serve(
    model: nn.Module, requests: Sequence[TraceRequest], prompts: Prompts, size: int, wait: float
) -> Replay:
    """Serve all requests (in order of arrival), batch after batch. size, wait: see `next_batch`."""
    arrivals = [request.arrival for request in requests]
    free, served, steps = 0.0, [], []
    while len(served) < len(requests):
        indices, start = next_batch(arrivals, len(served), free, size, wait)
        members = [requests[index] for index in indices]
        longest = max(request.output for request in members)
        written, seconds, _ = continue_batch(model, [prompts[index] for index in indices], longest)
        batch = account(members, start, seconds, written)
        served += batch.requests
        steps += batch.steps
        free = served[-1].done
    return Replay(served, steps)


def next_batch(
    arrivals: Sequence[float], waiting: int, free: float, size: int, wait: float
) -> tuple[range, float]:
    """Return the numbers of the requests in the next batch, and the time at which the batch starts.

    arrivals: times of all requests, in order. waiting: the first request not yet served. free: time from
    which the machine is free. size: most requests. wait: seconds after which the first request no longer
    waits for a full batch; infinite for static batching, whose last batch takes the remaining requests.
    """
    patience = max(free, arrivals[waiting] + wait)
    members = range(waiting, min(waiting + size, bisect_right(arrivals, patience)))
    full = len(members) == size or patience == math.inf
    return members, max(free, arrivals[members[-1]]) if full else patience


def account(
    requests: Sequence[TraceRequest], start: float, seconds: Sequence[float], written: Sequence[Sequence[int]]
) -> Replay:
    """Return the answers and steps of one batch that started at `start`. seconds: time of each step.

    All answers are done when the batch ends, because `generate` returns them together; first tokens count
    from the first step. Padding and finished members occupy slots of the cache too.
    """
    size, width = len(requests), max(request.prompt for request in requests)
    tokens = sum(request.prompt for request in requests)
    steps = [BatchStep(seconds[0], size * width, tokens, used=tokens, reserved=size * width)]
    for made, took in enumerate(seconds[1:], 1):  # made: tokens that each member has before this step
        live = [request for request in requests if request.output > made]
        used, reserved = sum(request.prompt + made for request in live), size * (width + made)
        steps.append(BatchStep(took, 0, 0, size, size - len(live), used, reserved))
    first, done = start + seconds[0], start + sum(seconds)
    served = [
        Served(request.arrival, first, done, tuple(ids[: request.output]))
        for request, ids in zip(requests, written, strict=True)
    ]
    return Replay(served, steps)
