"""Statistics of request times."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.serving.bench.batching.accounting import spread


@dataclass(frozen=True)
class Timed:
    """One request. began, ended, at (arrivals of the chunks with text): seconds of one clock.

    prompt_tokens, output_tokens: the server's counts, None if it does not count. error: kind of failure, with
    its message; None if the request succeeded.
    """

    began: float
    ended: float
    at: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def tokens(self) -> int:
        """Number of new tokens; if the server does not count them, the number of chunks."""
        return len(self.at) if self.output_tokens is None else self.output_tokens


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90, p99 (linearly interpolated) and mean; None without values."""
    if not values:
        return None
    return spread(values) | {"mean": statistics.fmean(values)}


def summarize(requests: Sequence[Timed]) -> dict[str, Any]:
    """Return the statistics of all requests of one level of load. Failed requests are only counted.

    ttft_seconds: from a request's start to its first text. itl_seconds: between successive chunks of an
    answer; a chunk may hold several tokens (`tokens_per_chunk`). output_tokens_per_second: of all requests
    together; …_per_user: mean over requests of tokens divided by the request's time. messages: the first
    message of each kind of error.
    """
    good = [request for request in requests if request.error is None]
    errors = Counter(request.error for request in requests if request.error)
    messages = {r.error: r.message for r in reversed(requests) if r.error}
    seconds = max((r.ended for r in requests), default=0.0) - min((r.began for r in requests), default=0.0)
    tokens, chunks = sum(request.tokens for request in good), sum(len(request.at) for request in good)
    gaps = [b - a for request in good for a, b in zip(request.at, request.at[1:], strict=False)]
    prompts = [request.prompt_tokens for request in good if request.prompt_tokens is not None]
    alone = [request.tokens / (request.ended - request.began) for request in good if request.tokens]
    return {
        "requests": len(requests),
        "completed": len(good),
        "errors": dict(errors),
        "messages": messages,
        "seconds": seconds,
        "prompt_tokens": statistics.fmean(prompts) if prompts else None,
        "output_tokens": tokens,
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "requests_per_second": len(good) / seconds if seconds else None,
        "output_tokens_per_second": tokens / seconds if seconds else None,
        "output_tokens_per_second_per_user": statistics.fmean(alone) if alone else None,
        "ttft_seconds": percentiles([request.at[0] - request.began for request in good if request.at]),
        "itl_seconds": percentiles(gaps),
        "latency_seconds": percentiles([request.ended - request.began for request in good]),
    }
