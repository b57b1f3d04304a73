"""The report of batching measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from quantkit.evaluation.comparison.columns import NOTHING
from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import figure

Record = dict[str, Any]
IDLE_MACHINE = 0.5  # below this share of busy time, the trace mostly measures waiting
MEANINGS = {
    "tok/s": "new tokens a second",
    "±": "half the range of the rounds",
    "ratio": "tok/s over the first row's",
    "p50": "seconds from arrival to the answer, median",
    "p90": "90th percentile",
    "p99": "99th percentile",
    "1st p50": "seconds from arrival to the first token, median",
    "1st p99": "99th percentile",
    "padded": "share of padding in the prompts",
    "idle": "share of finished sequences in decoding",
    "KV used": "tokens in the cache, averaged over the computed time",
    "reserved": "slots of the cache reserved for tokens",
}
SECONDS = ("p50", "p90", "p99", "1st p50", "1st p99")
UNITS = {"KV used": "tokens", "reserved": "tokens", **dict.fromkeys(SECONDS, "s")}


def report(record: Record) -> Report:
    """Return the report: conditions, a table of speed, latency and waste, and a plot of latencies."""
    settings = record["settings"]
    setup = f"{record['dtype']} on {record['device']}, {settings['batch'][0]} sequences at once"
    done = [outcome for outcome in record["outcomes"] if outcome["figures"]]
    medians = f"the median of {settings['repeats']} rounds after a warm-up, ± half their range"
    medians = medians if settings["repeats"] > 1 else "one round after a warm-up"
    rows = [_cells(outcome) for outcome in done]
    return Report(
        title=f"Speed and latency of batching with {record['model']}",
        facts={
            "model": f"{record['model']}, {record['weights']}, {record['attention']} attention",
            "trace": f"{describe(record['trace'])}; Poisson arrivals at {settings['rate']:g}/s",
            "measured": f"{setup}; {medians}; waiting by a virtual clock",
        },
        tables=[Table(["batching", *MEANINGS], [("", rows)], MEANINGS, UNITS, explained=True)],
        notes=list(_notes(record, done)),
        figures=[_latencies(done)],
    )


def describe(requests: Sequence[Record]) -> str:
    """Return `32 requests in 3.9 s; prompts 4 to 121 tokens (median 40), outputs …`."""
    arrivals, prompts, outputs = ([row[key] for row in requests] for key in ("arrival", "prompt", "output"))
    lengths = [
        f"{min(found)} to {max(found)} tokens (median {statistics.median(found):g})"
        for found in (prompts, outputs)
    ]
    span = f"{len(requests)} requests in {arrivals[-1] - arrivals[0]:.3g} s"
    return f"{span}; prompts {lengths[0]}, outputs {lengths[1]}"


def _cells(outcome: Record) -> list[str]:
    found, speeds = outcome["figures"], outcome["tokens_per_second"]
    half = (max(speeds) - min(speeds)) / 2 / found["tokens_per_second"]
    return [
        outcome["strategy"],
        figure(found["tokens_per_second"]),
        f"{half:.0%}" if len(speeds) > 1 else NOTHING,
        f"{outcome['ratio']:.2f}×",
        *(figure(found["latency"][name]) for name in ("p50", "p90", "p99")),
        *(figure(found["first_token"][name]) for name in ("p50", "p99")),
        f"{found['padded']:.1%}",
        f"{found['idle']:.1%}",
        f"{found['used']:,.0f}",
        f"{found['reserved']:,.0f}",
    ]


def _notes(record: Record, done: Sequence[Record]) -> Iterator[tuple[str, str]]:
    for outcome in record["outcomes"]:
        if outcome["refused"]:
            yield f"{outcome['strategy']} refused: {outcome['refused']}", "yellow"
    if slack := [outcome["strategy"] for outcome in done if outcome["figures"]["busy"] < IDLE_MACHINE]:
        less = "computed less than half of the time: a higher --rate shows the machine's own tokens/s"
        yield f"{', '.join(slack)} {less}", "yellow"


def _latencies(done: Sequence[Record]) -> Figure:
    """Return a plot of the share of requests answered within a time."""
    series = []
    for place, outcome in enumerate(done):
        latencies = sorted(served["done"] - served["arrival"] for served in outcome["requests"])
        points = [Point(x, 100 * (index + 1) / len(latencies)) for index, x in enumerate(latencies)]
        series.append(Series(outcome["strategy"], tuple(points), place, joined=True))
    return Figure(
        key="latency",
        title="Answered requests",
        caption="Share of the requests that are answered within so many seconds after their arrival.",
        x=Axis("seconds after arrival"),
        y=Axis("answered requests, %"),
        series=tuple(series),
    )
