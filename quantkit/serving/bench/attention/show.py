"""What was measured of attention, for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import size

Record = dict[str, Any]
UNITS = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"))
HEADERS = ("attention", "N", "prefill", "±", "×", "memory", "decode", "memory")


def report(record: Record) -> Report:
    """How it was measured, times and memory, what ran, how memory grows, the longest prompt in words."""
    settings, context = record["settings"], record["context"]
    limit = f", made for {context:,} tokens" if context else ""
    measured = f"{record['dtype']} on {record['device']}, batch {settings['batch']}, prompts of N tokens"
    return Report(
        title=f"Attention of {record['model']}",
        facts={
            "model": f"{record['model']}{limit}; weights {size(record['weight_bytes'])}, {record['weights']}",
            "measured": f"{measured}; medians of {settings['repeats']} runs in turn after a warm-up, ± half "
            "their range",
            "memory": f"{record['memory']}, above the loaded model",
        },
        tables=[Table(HEADERS, list(_rows(record))), *_fits(record)],
        notes=[*_kernels(record), *_grows(record), *_longest(record)],
        figures=_figures(record),
    )


def _rows(record: Record) -> Iterator[tuple[str, list[list[str]]]]:
    """A group for each length; what is refused has one row, at the length from which on."""
    refused: set[str] = set()
    for length in sorted({row["length"] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["length"] == length and row["attention"] not in refused]
        first = next((row for row in rows if not row["refused"]), None)
        yield "", [_cells(row, first) for row in rows]
        refused |= {row["attention"] for row in rows if row["refused"]}


def _cells(row: Record, first: Record | None) -> list[str]:
    """Of a row; × is how much faster it is than the first implementation that ran at this length."""
    named = [row["attention"], f"{row['length']:,}"]
    if row["refused"] or first is None:
        return [*named, "refused", *[""] * (len(HEADERS) - 3)]
    middle = statistics.median(row["seconds"])
    half = (max(row["seconds"]) - min(row["seconds"])) / 2 / middle
    times = f"{statistics.median(first['seconds']) / middle:.2f}"
    decode = duration(statistics.median(row["step_seconds"]))
    return [*named, duration(middle), f"{half:.0%}", times, _bytes(row['prefill_bytes']), decode,
            _bytes(row['decode_bytes'])]  # fmt: skip


def duration(seconds: float) -> str:
    """`12.3 ms`, `4.56 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _bytes(nbytes: int | None) -> str:
    """Three digits: `390 kB`, `14.7 MB`, `1.23 GB`."""
    if nbytes is None:
        return "?"
    scale, unit = next(row for row in UNITS if nbytes < 999.5 * row[0] or row is UNITS[-1])
    return f"{nbytes / scale:.3g} {unit}"


def _fits(record: Record) -> Iterator[Table]:
    if record["fits"]:
        rows = [
            [name, f"{size(found['a'])} + {found['b']:,.0f}·N + {found['c']:.2f}·N²", f"{found['c']:.2f}",
             f"{found['error']:.2f}", f"{found['matrices']:.2f}"]
            for name, found in record['fits'].items()
        ]  # fmt: skip
        yield Table(("prefill memory", "a + b·N + c·N²", "c", "±", "score matrices"), [("", rows)])


def _kernels(record: Record) -> Iterator[tuple[str, str]]:
    """What ran under each name, and where it was refused, in the library's words."""
    for name in record["settings"]["implementations"]:
        rows = [row for row in record["rows"] if row["attention"] == name]
        kernel = next((row["kernel"] for row in rows if row["kernel"]), "")
        refused = next((row for row in rows if row["refused"]), None)
        if kernel:
            yield f"{name} ran: {kernel}", ""
        if refused is not None:
            place = f" from {refused['length']:,} tokens on" if kernel else ""
            yield f"{name} refused{place}: {refused['refused']}", "yellow"


def _grows(record: Record) -> Iterator[tuple[str, str]]:
    heads, batch = record["heads"], record["settings"]["batch"]
    for one in list(record["fits"].values())[:1]:
        scores, all_of = one["scores"], f" × batch {batch}" if batch > 1 else ""
        matrix = f"{heads} heads × {scores // (heads * batch)} bytes{all_of} = {scores}·N² bytes"
        yield f"one layer's score matrix is {matrix}", ""
    for name, found in record["fits"].items():
        yield f"{name}: {verdict(found)}", ""


def verdict(found: Record) -> str:
    """Whether memory grows with N², in words."""
    if found["quadratic"]:
        return f"writes its scores out: {found['matrices']:.1f} score matrices at its peak"
    if not found["told"]:
        return "whether it grows with N² is not told by prompts this short: something else is the peak"
    return "does not grow with N²: no score matrix is written out"


def _longest(record: Record) -> Iterator[tuple[str, str]]:
    """The longest prompt that two or more ran, weights and all: what people compare."""
    done = [row for row in record["rows"] if not row["refused"]]
    lengths = [row["length"] for row in done]
    longest = max((length for length in lengths if lengths.count(length) > 1), default=None)
    parts = []
    for row in (row for row in done if row["length"] == longest):
        parts.append(f"{row['attention']} {duration(statistics.median(row['seconds']))}")
        if row["prefill_bytes"] is not None:
            parts[-1] += f" and {size(record['weight_bytes'] + row['prefill_bytes'])}"
    if parts:
        yield f"{longest:,} tokens, weights and all: " + ", ".join(parts), "bold"


def _figures(record: Record) -> list[Figure]:
    """Prefill time and peak memory over the prompt's length, the fits as dashed lines."""
    times, memory = [], []
    for place, name in enumerate(record["settings"]["implementations"]):
        rows = [row for row in record["rows"] if row["attention"] == name and not row["refused"]]
        points = [
            Point(r["length"], statistics.median(r["seconds"]), min(r["seconds"]), max(r["seconds"]))
            for r in rows
        ]
        times.append(Series(name, tuple(points), place, joined=True))
        told = [Point(r["length"], r["prefill_bytes"]) for r in rows if r["prefill_bytes"] is not None]
        found = record["fits"].get(name)
        memory.append(Series(name, tuple(told), place, joined=found is None))
        if found:
            xs = np.geomspace(told[0].x, told[-1].x, 61)
            ys = np.polyval([found["c"], found["b"], found["a"]], xs)
            curve = [Point(*pair) for pair in np.stack([xs, ys], 1).tolist()]
            above = tuple(point for point in curve if point.y > 0)  # a logarithmic axis has no others
            memory.append(Series(name, above, place, joined=True, bare=True))
    lengths = tuple(sorted({row["length"] for row in record["rows"]}))
    x = Axis("tokens of the prompt", "whole", log=True, ticks=lengths)
    fitted = "Dashed: a + b·N + c·N²." if record["fits"] else "Of too few lengths to be fitted."
    made = [
        Figure("time", "Time of the prefill", "Bars: least and most of all runs.", x,
               Axis("seconds", log=True), tuple(one for one in times if one.points)),
        Figure("memory", "Memory of the prefill", fitted, x, Axis("bytes above the model", "bytes", log=True),
               tuple(one for one in memory if one.points)),
    ]  # fmt: skip
    return [figure for figure in made if figure.series]
