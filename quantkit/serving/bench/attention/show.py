"""The report of attention measurements."""

import statistics
from collections.abc import Callable, Iterator

from quantkit.evaluation.comparison.columns import Columns, at
from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report
from quantkit.serving.bench.show import Record, half_range, milliseconds, table
from quantkit.tables import size

MEMORY = "peak of torch's allocations in the prefill, above the loaded model"


def _median(name: str) -> Callable[[Record], str]:
    """Return a function from a row to the cell with the median of its seconds, in milliseconds."""
    return lambda row: milliseconds(statistics.median(row[name]))


COLUMNS: Columns = {  # for a row of the record
    "N": ("tokens of the prompt", lambda row: f"{row['length']:,}"),
    "prefill ms": ("milliseconds until the prompt is processed (median)", _median("seconds")),
    "±": ("half the range of the runs, as a share of the median", lambda row: half_range(row["seconds"])),
    "ratio": ("prefill speed as a multiple of the first row's, at the same N", at("ratio", "{:.2f}×".format)),
    "memory": (MEMORY, at("prefill_bytes", size)),
    "token ms": ("milliseconds of each new token after the prompt (median)", _median("step_seconds")),
}


def report(record: Record) -> Report:
    """Return the report: conditions, a table of times and memory, the kernels that ran, and plots."""
    settings, context = record["settings"], record["context"]
    limit = f", made for {context:,} tokens" if context else ""
    setup = f"{record['dtype']} on {record['device']}, batch {settings['batch'][0]}, prompts of N tokens"
    medians = f"medians of {settings['repeats']} runs in turn after a warm-up, ± half their range"
    medians = medians if settings["repeats"] > 1 else "one run after a warm-up"
    lengths = sorted({row["length"] for row in record["rows"]})
    groups = [("", _compared(record, length)) for length in lengths]
    return Report(
        title=f"Speed and memory of attention in {record['model']}",
        facts={
            "model": f"{record['model']}{limit}; weights {size(record['weight_bytes'])}, {record['weights']}",
            "measured": f"{setup}; {medians}",
            "memory": MEMORY,
        },
        tables=[table("attention", COLUMNS, groups, {"N": "tokens"})],
        notes=list(_kernels(record)),
        figures=_figures(record, lengths),
    )


def _by_name(record: Record) -> dict[str, list[Record]]:
    names = dict.fromkeys(row["attention"] for row in record["rows"])
    return {name: [row for row in record["rows"] if row["attention"] == name] for name in names}


def _compared(record: Record, length: int) -> list[tuple[str, Record]]:
    """Return the rows for prompts of `length` tokens, with ratios to the first implementation that ran."""
    ran = [row for row in record["rows"] if row["length"] == length and not row["refused"]]
    medians = [statistics.median(row["seconds"]) for row in ran]
    ratios = [medians[0] / median for median in medians]
    return [(row["attention"], row | {"ratio": ratio}) for row, ratio in zip(ran, ratios, strict=True)]


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
