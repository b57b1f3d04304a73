"""The report of attention measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from quantkit.evaluation.comparison.columns import NOTHING
from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import figure, size

Record = dict[str, Any]
MEANINGS = {
    "N": "tokens of the prompt",
    "prefill ms": "milliseconds until the prompt is processed (median)",
    "±": "half the range of the runs, as a share of the median",
    "ratio": "prefill speed as a multiple of the first row's, at the same N",
    "memory": "peak of torch's allocations in the prefill, above the loaded model",
    "token ms": "milliseconds of each new token after the prompt (median)",
}


def report(record: Record) -> Report:
    """Return the report: conditions, a table of times and memory, the kernels that ran, and plots."""
    settings, context = record["settings"], record["context"]
    limit = f", made for {context:,} tokens" if context else ""
    setup = f"{record['dtype']} on {record['device']}, batch {settings['batch'][0]}, prompts of N tokens"
    medians = f"medians of {settings['repeats']} runs in turn after a warm-up, ± half their range"
    medians = medians if settings["repeats"] > 1 else "one run after a warm-up"
    lengths = sorted({row["length"] for row in record["rows"]})
    groups = [("", [*_cells(record, length)]) for length in lengths]
    return Report(
        title=f"Speed and memory of attention in {record['model']}",
        facts={
            "model": f"{record['model']}{limit}; weights {size(record['weight_bytes'])}, {record['weights']}",
            "measured": f"{setup}; {medians}",
            "memory": MEANINGS["memory"],
        },
        tables=[Table(["attention", *MEANINGS], groups, MEANINGS, {"N": "tokens"})],
        notes=list(_kernels(record)),
        figures=_figures(record, lengths),
    )


def _by_name(record: Record) -> dict[str, list[Record]]:
    """Return the rows of each implementation."""
    names = dict.fromkeys(row["attention"] for row in record["rows"])
    return {name: [row for row in record["rows"] if row["attention"] == name] for name in names}


def _cells(record: Record, length: int) -> Iterator[list[str]]:
    """Yield table rows for prompts of `length` tokens; ratios are to the first implementation that ran."""
    ran = [row for row in record["rows"] if row["length"] == length and not row["refused"]]
    for row in ran:
        median, first = statistics.median(row["seconds"]), statistics.median(ran[0]["seconds"])
        half = (max(row["seconds"]) - min(row["seconds"])) / 2 / median
        spread = f"{half:.0%}" if len(row["seconds"]) > 1 else NOTHING
        memory = NOTHING if row["prefill_bytes"] is None else size(row["prefill_bytes"])
        step = figure(1e3 * statistics.median(row["step_seconds"]))
        yield [row["attention"], f"{length:,}", figure(1e3 * median), spread,
               f"{first / median:.2f}×", memory, step]  # fmt: skip


def _kernels(record: Record) -> Iterator[tuple[str, str]]:
    """Yield each implementation's name, with its kernel or the reason and length of its failure."""
    for name, rows in _by_name(record).items():
        if kernel := rows[0]["kernel"]:
            yield f"{name} ran: {kernel}", ""
        if refused := next((row for row in rows if row["refused"]), None):
            where = f" from {refused['length']:,} tokens on" if kernel else ""
            yield f"{name} refused{where}: {refused['refused']}", "yellow"


def _figures(record: Record, lengths: list[int]) -> list[Figure]:
    """Return prefill time and peak memory over the length of the prompt."""
    seconds, memory = [], []
    for colour, (name, rows) in enumerate(_by_name(record).items()):
        ran = [row for row in rows if not row["refused"]]
        points = [
            Point(row["length"], statistics.median(row["seconds"]), min(row["seconds"]), max(row["seconds"]))
            for row in ran
        ]
        peaks = [Point(row["length"], row["prefill_bytes"]) for row in ran if row["prefill_bytes"]]
        seconds += [Series(name, tuple(points), colour, joined=True)] if points else []
        memory += [Series(name, tuple(peaks), colour, joined=True)] if peaks else []
    x = Axis("tokens of the prompt", "whole", log=True, ticks=tuple(lengths))
    y_seconds, y_bytes = Axis("seconds", log=True), Axis("bytes above the loaded model", "bytes", log=True)
    bars, most = "Bars: fastest and slowest run.", "The most that was allocated at once."
    figures = [
        Figure(
            "time", "Time of the prefill", "The median of all runs.", x, y_seconds, tuple(seconds), bars=bars
        ),
        Figure("memory", "Memory of the prefill", most, x, y_bytes, tuple(memory)),
    ]
    return [drawn for drawn in figures if drawn.series]
