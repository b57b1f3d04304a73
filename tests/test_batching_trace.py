"""Traces: the seed, the distributions, files; and how batches are formed of them."""

import json
import math
import os
import statistics
from dataclasses import asdict

import pytest

from quantkit.errors import QuantkitError
from quantkit.serving.bench.batching import trace
from quantkit.serving.bench.batching.padded import Batch, next_batch
from quantkit.serving.bench.batching.show import describe
from quantkit.serving.bench.batching.trace import Lengths, Request, Trace

PROMPTS, OUTPUTS = "lognormal:64,0.8", "geometric:32"


def drawn(count=4000, rate=8.0, seed=0, context=None, prompts=PROMPTS, outputs=OUTPUTS) -> Trace:
    return trace.sample(count, rate, prompts, outputs, context, seed)


def test_a_seed_gives_one_trace_and_another_seed_another():
    assert drawn(50) == drawn(50)
    assert drawn(50).requests != drawn(50, seed=1).requests
    assert drawn(5).requests == drawn(50).requests[:5]


def test_another_rate_brings_the_same_requests_at_other_times():
    slow, fast = drawn(50, rate=2.0).requests, drawn(50, rate=8.0).requests
    assert [(r.prompt, r.output) for r in slow] == [(r.prompt, r.output) for r in fast]
    assert [r.arrival for r in slow] == pytest.approx([4 * r.arrival for r in fast])
    assert {r.arrival for r in drawn(50, rate=math.inf).requests} == {0.0}


def test_arrivals_are_a_poisson_process():
    """Gaps of mean 1/rate, of which 1/e are longer than the mean, and as spread as they are long."""
    times = [request.arrival for request in drawn().requests]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.08)
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_lengths_are_those_of_their_distribution():
    requests = drawn().requests
    prompts, outputs = [r.prompt for r in requests], [r.output for r in requests]
    logs = [math.log(length) for length in prompts]
    assert statistics.median(prompts) == pytest.approx(64, rel=0.06)
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(32, rel=0.06)
    assert sum(length == 1 for length in outputs) / len(outputs) == pytest.approx(1 / 32, abs=0.01)
    even = [r.prompt for r in drawn(prompts="uniform:3-6").requests]
    assert {length: even.count(length) / 4000 for length in set(even)} == pytest.approx(
        dict.fromkeys((3, 4, 5, 6), 0.25), abs=0.03
    )
    assert {r.prompt for r in drawn(50, prompts="fixed:7").requests} == {7}


def test_no_request_is_longer_than_the_context():
    requests = drawn(context=64).requests
    assert max(r.prompt for r in requests) == 32
    assert max(r.prompt + r.output for r in requests) == 64 and min(r.output for r in requests) >= 1


def test_a_trace_says_how_it_was_drawn():
    made = trace.sample(context=256)
    assert len(made.requests) == 32
    assert made.origin == "Poisson arrivals at 8/s, prompts uniform:16-128, outputs geometric:32, seed 0"


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:x", "uniform:6-3", "zipf:2", "fixed:0", "uniform:3", "fixed:nan"]
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(QuantkitError, match="is no distribution of lengths") as error:
        Lengths.parse(text)
    assert error.value.exit_code == 2 and "uniform:16-128" in error.value.hint


def test_a_file_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [(3.5, 10, 2), (1.5, 20, 4)]
    fields = ("arrival", "prompt_tokens", "output_tokens")
    path.write_text("\n".join(json.dumps(dict(zip(fields, line, strict=True))) for line in lines) + "\n\n")
    read = trace.read(path, context=24)
    assert read.requests == (Request(0.0, 20, 4), Request(2.0, 10, 2))
    assert describe([asdict(request) for request in read.requests]) == (
        "2 requests in 2 s; prompts 10 to 20 tokens (median 15), outputs 2 to 4 tokens (median 3)"
    )
    with pytest.raises(QuantkitError, match="line 2 needs 24 tokens, the model was made for 23"):
        trace.read(path, context=23)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1 is no request: Expecting"),
        ('{"arrival": 0, "prompt_tokens": 3}', "lacks 'output_tokens'"),
        ('{"arrival": 0, "prompt_tokens": 3, "output_tokens": 0}', "none of its kind"),
        ('{"arrival": Infinity, "prompt_tokens": 3, "output_tokens": 1}', "none of its kind"),
        ('{"arrival": "now", "prompt_tokens": 3, "output_tokens": 1}', "must be real number"),
        ("[1, 2, 3]", "is no request"),
        ("", "holds no request"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, line, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(QuantkitError, match=reason):
        trace.read(path, context=None)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(QuantkitError, match="cannot be read") as error:
        trace.read(tmp_path / "none.jsonl", None)
    assert error.value.exit_code == 3


ARRIVALS = [0.0, 1.0, 2.0, 5.0, 5.5]


def test_a_static_batch_waits_until_it_is_full_or_nobody_comes():
    assert next_batch(ARRIVALS, 0, 0.0, size=3, wait=math.inf) == Batch((0, 1, 2), 2.0)
    assert next_batch(ARRIVALS, 0, 9.0, size=3, wait=math.inf) == Batch((0, 1, 2), 9.0)
    assert next_batch(ARRIVALS, 3, 4.0, size=3, wait=math.inf) == Batch((3, 4), 5.5)


def test_a_dynamic_batch_waits_for_its_time_or_until_it_is_full():
    assert next_batch(ARRIVALS, 0, 0.0, size=3, wait=0.5) == Batch((0,), 0.5)
    assert next_batch(ARRIVALS, 0, 0.0, size=2, wait=3.0) == Batch((0, 1), 1.0)
    assert next_batch(ARRIVALS, 0, 1.5, size=3, wait=0.5) == Batch((0, 1), 1.5)
    assert next_batch(ARRIVALS, 0, 9.0, size=4, wait=0.5) == Batch((0, 1, 2, 3), 9.0)
    assert next_batch(ARRIVALS, 3, 4.0, size=3, wait=1.0) == Batch((3, 4), 6.0)


@pytest.mark.parametrize("values", [{"count": 0}, {"rate": 0.0}, {"rate": math.nan}])
def test_values_that_make_no_trace_are_refused(values):
    with pytest.raises(QuantkitError):
        drawn(**values)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(pipe := tmp_path / "trace.jsonl")
    with pytest.raises(QuantkitError, match="is no plain file") as error:
        trace.read(pipe, None)
    assert error.value.exit_code == 4


def test_a_deep_line_is_no_request(tmp_path):
    (path := tmp_path / "trace.jsonl").write_text("[" * 100_000)
    with pytest.raises(QuantkitError, match="line 1 is no request: it is nested too deeply"):
        trace.read(path, None)
