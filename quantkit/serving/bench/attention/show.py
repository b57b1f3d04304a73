"""The report of attention measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import figure, size

Record = dict[str, Any]
HEADERS = ("attention", "N", "prefill ms", "±", "×", "memory", "token ms")


def report(record: Record) -> Report:
    """Return how attention was measured, times and memory, and the kernels that ran."""
    settings, context = record["settings"], record["context"]
    limit = f", made for {context:,} tokens" if context else ""
    setup = f"{record['dtype']} on {record['device']}, batch {settings['batch'][0]}, prompts of N tokens"
    lengths = sorted({row["length"] for row in record["rows"]})
    return Report(
        title=f"Attention of {record['model']}",
        facts={
            "model": f"{record['model']}{limit}; weights {size(record['weight_bytes'])}, {record['weights']}",
            "measured": f"{setup}; medians of {settings['repeats']} runs in turn after a warm-up, ± half "
            "their range",
            "memory": "peak of torch's allocations in the prefill, above the loaded model",
        },
        tables=[Table(HEADERS, [("", list(_rows(record, length))) for length in lengths])],
        notes=list(_kernels(record)),
        figures=_figures(record, lengths),
    )


def _rows(record: Record, length: int) -> Iterator[list[str]]:
    """Yield the cells of a length; × is the speed against the first implementation that ran."""
    ran = [row for row in record["rows"] if row["length"] == length and not row["refused"]]
    for row in ran:
        middle, first = statistics.median(row["seconds"]), statistics.median(ran[0]["seconds"])
        half = (max(row["seconds"]) - min(row["seconds"])) / 2 / middle
        memory = "–" if row["prefill_bytes"] is None else size(row["prefill_bytes"])
        step = figure(1e3 * statistics.median(row["step_seconds"]))
        yield [row["attention"], f"{length:,}", figure(1e3 * middle), f"{half:.0%}",
               f"{first / middle:.2f}", memory, step]  # fmt: skip


def _kernels(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the kernel of each name, and where the library refused it."""
    for name in dict.fromkeys(row["attention"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["attention"] == name]
        if kernel := rows[0]["kernel"]:
            yield f"{name} ran: {kernel}", ""
        if refused := next((row for row in rows if row["refused"]), None):
            place = f" from {refused['length']:,} tokens on" if kernel else ""
            yield f"{name} refused{place}: {refused['refused']}", "yellow"


def _figures(record: Record, lengths: list[int]) -> list[Figure]:
    """Return prefill time and peak memory over the length of the prompt."""
    times, memory = [], []
    for place, name in enumerate(dict.fromkeys(row["attention"] for row in record["rows"])):
        rows = [row for row in record["rows"] if row["attention"] == name and not row["refused"]]
        taken = [(row["length"], statistics.median(row["seconds"]), row["seconds"]) for row in rows]
        points = [Point(length, middle, min(found), max(found)) for length, middle, found in taken]
        counted = [Point(row["length"], row["prefill_bytes"]) for row in rows if row["prefill_bytes"]]
        times += [Series(name, tuple(points), place, joined=True)] if points else []
        memory += [Series(name, tuple(counted), place, joined=True)] if counted else []
    x = Axis("tokens of the prompt", "whole", log=True, ticks=tuple(lengths))
    bars = "Bars: least and most of all runs."
    y = Axis("bytes above the model", "bytes", log=True)
    made = [
        Figure("time", "Time of the prefill", bars, x, Axis("seconds", log=True), tuple(times)),
        Figure("memory", "Memory of the prefill", "The most that was allocated.", x, y, tuple(memory)),
    ]
    return [one for one in made if one.series]
