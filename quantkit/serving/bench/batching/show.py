"""The report of batching measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quantkit.evaluation.comparison.columns import NOTHING
from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import figure

Record = dict[str, Any]
IDLE_MACHINE = 0.5  # below this share of busy time, the trace mostly measures waiting


def _seconds(figure_name: str, percentile: str) -> Callable[[Record], str]:
    return lambda outcome: figure(outcome["figures"][figure_name][percentile])


def _figure(name: str, format_spec: str) -> Callable[[Record], str]:
    return lambda outcome: format(outcome["figures"][name], format_spec)


def _spread(speeds: Sequence[float]) -> str:
    """Return half the range of several rounds, as a share of the median round."""
    median = sorted(speeds)[len(speeds) // 2]
    return f"{(max(speeds) - min(speeds)) / 2 / median:.0%}" if len(speeds) > 1 else NOTHING


COLUMNS = {  # meaning, unit, cell
    "tok/s": ("new tokens a second", "", lambda outcome: figure(outcome["figures"]["tokens_per_second"])),
    "±": ("half the range of the rounds", "", lambda outcome: _spread(outcome["tokens_per_second"])),
    "ratio": ("tok/s over the first row's", "", lambda outcome: f"{outcome['ratio']:.2f}×"),
    "p50": ("seconds from arrival to the answer, median", "s", _seconds("latency", "p50")),
    "p90": ("90th percentile", "s", _seconds("latency", "p90")),
    "p99": ("99th percentile", "s", _seconds("latency", "p99")),
    "1st p50": ("seconds from arrival to the first token, median", "s", _seconds("first_token", "p50")),
    "1st p99": ("99th percentile", "s", _seconds("first_token", "p99")),
    "padded": ("share of padding in the prompts", "", _figure("padded", ".1%")),
    "idle": ("share of finished sequences in decoding", "", _figure("idle", ".1%")),
    "KV used": ("tokens in the cache, averaged over the computed time", "tokens", _figure("used", ",.0f")),
    "reserved": ("slots of the cache reserved for tokens", "tokens", _figure("reserved", ",.0f")),
}


def report(record: Record) -> Report:
    """Return the report: conditions, a table of speed, latency and waste, and a plot of latencies."""
    settings = record["settings"]
    setup = f"{record['dtype']} on {record['device']}, {settings['batch'][0]} sequences at once"
    done = [outcome for outcome in record["outcomes"] if outcome["figures"]]
    medians = f"the median of {settings['repeats']} rounds after a warm-up, ± half their range"
    medians = medians if settings["repeats"] > 1 else "one round after a warm-up"
    rows = [[outcome["strategy"], *(cell(outcome) for _, _, cell in COLUMNS.values())] for outcome in done]
    meanings = {name: meaning for name, (meaning, _, _) in COLUMNS.items()}
    units = {name: unit for name, (_, unit, _) in COLUMNS.items() if unit}
    return Report(
        title=f"Speed and latency of batching with {record['model']}",
        facts={
            "model": f"{record['model']}, {record['weights']}, {record['attention']} attention",
            "trace": f"{describe(record['trace'])}; Poisson arrivals at {settings['rate']:g}/s",
            "measured": f"{setup}; {medians}; waiting by a virtual clock",
        },
        tables=[Table(["batching", *COLUMNS], [("", rows)], meanings, units, explained=True)],
        notes=list(_notes(record, done)),
        figures=[_latencies(done)],
    )


def describe(requests: Sequence[Record]) -> str:
    """Return `32 requests in 3.9 s; prompts 4 to 121 tokens (median 40), outputs …`."""
    arrivals, prompts, outputs = (
        [request[key] for request in requests] for key in ("arrival", "prompt", "output")
    )
    lengths = [
        f"{min(counts)} to {max(counts)} tokens (median {statistics.median(counts):g})"
        for counts in (prompts, outputs)
    ]
    span = f"{len(requests)} requests in {arrivals[-1] - arrivals[0]:.3g} s"
    return f"{span}; prompts {lengths[0]}, outputs {lengths[1]}"


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
    for colour, outcome in enumerate(done):
        latencies = sorted(served["done"] - served["arrival"] for served in outcome["requests"])
        points = [Point(x, 100 * (index + 1) / len(latencies)) for index, x in enumerate(latencies)]
        series.append(Series(outcome["strategy"], tuple(points), colour, joined=True))
    return Figure(
        key="latency",
        title="Answered requests",
        caption="Share of the requests that are answered within so many seconds after their arrival.",
        x=Axis("seconds after arrival"),
        y=Axis("answered requests, %"),
        series=tuple(series),
    )
