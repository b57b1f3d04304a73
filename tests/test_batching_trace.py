"""Traces: the seed, the distributions, files; and how batches are formed of them."""

import math
import statistics

import pytest

from quantkit.serving.bench.batching import trace
from quantkit.serving.bench.batching.padded import next_batch
from quantkit.serving.bench.batching.trace import TraceRequest
from quantkit.serving.bench.settings import BatchingSettings


def drawn(count=4000, rate=8.0, seed=0, context=None) -> tuple[TraceRequest, ...]:
    return trace.sample(BatchingSettings(requests=count, rate=rate, seed=seed), context)


def test_a_seed_gives_one_trace_and_another_seed_another():
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=1)
    assert drawn(5) == drawn(50)[:5]


def test_arrivals_are_a_poisson_process():
    """Gaps of mean 1/rate, of which 1/e are longer than the mean, and as spread as they are long."""
    times = [request.arrival for request in drawn()]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.08)
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_lengths_have_their_means():
    prompts, outputs = [r.prompt for r in drawn()], [r.output for r in drawn()]
    assert (min(prompts), max(prompts), statistics.mean(prompts)) == (1, 127, pytest.approx(64, rel=0.05))
    assert statistics.mean(outputs) == pytest.approx(32, rel=0.05) and min(outputs) == 1
    assert statistics.median(outputs) == pytest.approx(32 * math.log(2), rel=0.07)


def test_no_request_is_longer_than_the_context():
    requests = drawn(context=64)
    assert max(r.prompt for r in requests) == 32
    assert max(r.prompt + r.output for r in requests) == 64 and min(r.output for r in requests) >= 1


ARRIVALS = [0.0, 1.0, 2.0, 5.0, 5.5]


def test_a_static_batch_waits_until_it_is_full_or_nobody_comes():
    assert next_batch(ARRIVALS, 0, 0.0, size=3, wait=math.inf) == (range(0, 3), 2.0)
    assert next_batch(ARRIVALS, 0, 9.0, size=3, wait=math.inf) == (range(0, 3), 9.0)
    assert next_batch(ARRIVALS, 3, 4.0, size=3, wait=math.inf) == (range(3, 5), 5.5)


def test_a_dynamic_batch_waits_for_its_time_or_until_it_is_full():
    assert next_batch(ARRIVALS, 0, 0.0, size=3, wait=0.5) == (range(0, 1), 0.5)
    assert next_batch(ARRIVALS, 0, 0.0, size=2, wait=3.0) == (range(0, 2), 1.0)
    assert next_batch(ARRIVALS, 0, 1.5, size=3, wait=0.5) == (range(0, 2), 1.5)
    assert next_batch(ARRIVALS, 0, 9.0, size=4, wait=0.5) == (range(0, 4), 9.0)
    assert next_batch(ARRIVALS, 3, 4.0, size=3, wait=1.0) == (range(3, 5), 6.0)
