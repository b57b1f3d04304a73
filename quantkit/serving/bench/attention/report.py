"""What was measured of attention: a table, a record (bench-attention-1.json describes it) and two plots."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from quantkit.serving.bench.attention.fit import Fit
from quantkit.serving.bench.attention.measurement import Result, Row
from quantkit.tables import make_table, print_facts, print_line, size

if TYPE_CHECKING:  # matplotlib takes a second, which --json has no use for
    from matplotlib.figure import Figure

SCHEMA = "quantkit.bench-attention/1"
PADDING = 0.1  # inches around the panels: a browser's letters are taller than matplotlib thinks
MARKS = "osD^v"


def record(result: Result) -> dict:
    """The versioned JSON."""
    told = asdict(result) | {"fits": {}}
    fits = {
        name: asdict(found) | {"matrices": found.matrices, "told": found.told, "quadratic": found.quadratic}
        for name, found in result.fits.items()
    }
    return {"schema": SCHEMA} | told | {"fits": fits}


def show(result: Result, console: Console) -> None:
    """How it was measured, the table, what ran, how memory grows, and the longest prompt in words."""
    settings = result.settings
    limit = f", made for {result.context:,} tokens" if result.context else ""
    print_facts(
        console,
        {
            "model": f"{result.model}{limit}; weights {size(result.weight_bytes)}, {result.weights}",
            "measured": f"{result.dtype} on {result.device}, batch {settings.batch}, prompts of N tokens; "
            f"medians of {settings.repeats} runs in turn after a warm-up, ± half their range",
            "memory": f"{result.memory}, above the loaded model",
        },
    )
    table = make_table("attention", "N", "prefill", "±", "×", "memory", "decode", "memory")
    refused: set[str] = set()  # a row each, at the length from which on
    for length in sorted({row.length for row in result.rows}):
        rows = [row for row in result.rows if row.length == length and row.attention not in refused]
        first = next((row for row in rows if not row.refused), None)
        for row in rows:
            table.add_row(
                *(_cells(row, first) if not row.refused else [row.attention, f"{length:,}", "refused"])
            )
        refused |= {row.attention for row in rows if row.refused}
        table.add_section()
    console.print(table)
    _print_kernels(result, console)
    _print_fits(result, console)
    _print_longest(result, console)


def _cells(row: Row, first: Row | None) -> list[str]:
    """Of a row; × is how much faster it is than the first implementation that ran at this length."""
    if row.refused or first is None:
        return [row.attention, f"{row.length:,}", "refused"]
    middle = statistics.median(row.seconds)
    half = (max(row.seconds) - min(row.seconds)) / 2 / middle
    return [
        row.attention,
        f"{row.length:,}",
        duration(middle),
        f"{half:.0%}",
        f"{statistics.median(first.seconds) / middle:.2f}",
        _bytes(row.prefill_bytes),
        duration(statistics.median(row.step_seconds)),
        _bytes(row.decode_bytes),
    ]


def duration(seconds: float) -> str:
    """`12.3 ms`, `4.56 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _bytes(nbytes: int | None) -> str:
    """Three digits: `390 kB`, `14.7 MB`, `1.23 GB`."""
    if nbytes is None:
        return "?"
    unit, scale = next(
        ((unit, scale) for unit, scale in (("kB", 1e3), ("MB", 1e6)) if nbytes < 999.5 * scale), ("GB", 1e9)
    )
    return f"{nbytes / scale:.3g} {unit}"


def _print_kernels(result: Result, console: Console) -> None:
    """What ran under each name, and where it was refused, in the library's words."""
    for name in result.settings.implementations:
        rows = [row for row in result.rows if row.attention == name]
        kernel = next((row.kernel for row in rows if row.kernel), "")
        refused = next((row for row in rows if row.refused), None)
        if kernel:
            print_line(console, f"{name} ran: {kernel}")
        if refused is not None:
            place = f" from {refused.length:,} tokens on" if kernel else ""
            print_line(console, f"{name} refused{place}: {refused.refused}", style="yellow")


def _print_fits(result: Result, console: Console) -> None:
    if not result.fits:
        return
    table = make_table("prefill memory", "a + b·N + c·N²", "c", "±", "score matrices")
    for name, found in result.fits.items():
        whole = f"{size(found.a)} + {found.b:,.0f}·N + {found.c:.2f}·N²"
        table.add_row(name, whole, f"{found.c:.2f}", f"{found.error:.2f}", f"{found.matrices:.2f}")
    console.print(table)
    one = next(iter(result.fits.values()))
    heads = f"{result.heads} heads × {one.scores // (result.heads * result.settings.batch)} bytes"
    batch = f" × batch {result.settings.batch}" if result.settings.batch > 1 else ""
    print_line(console, f"one layer's score matrix is {heads}{batch} = {one.scores}·N² bytes")
    for name, found in result.fits.items():
        print_line(console, f"{name}: {verdict(found)}")


def verdict(found: Fit) -> str:
    """Whether memory grows with N², in words."""
    if found.quadratic:
        return f"writes its scores out: {found.matrices:.1f} score matrices at its peak"
    if not found.told:
        return "whether it grows with N² is not told by prompts this short: something else is the peak"
    return "does not grow with N²: no score matrix is written out"


def _print_longest(result: Result, console: Console) -> None:
    """The longest prompt that two or more ran, weights and all: what people compare."""
    done = [row for row in result.rows if not row.refused]
    lengths = [row.length for row in done]
    shared = [length for length in set(lengths) if lengths.count(length) > 1]
    if not shared:
        return
    parts = []
    for row in (row for row in done if row.length == max(shared)):
        memory = "" if row.prefill_bytes is None else f" and {size(result.weight_bytes + row.prefill_bytes)}"
        parts.append(f"{row.attention} {duration(statistics.median(row.seconds))}{memory}")
    print_line(console, f"{max(shared):,} tokens, weights and all: " + ", ".join(parts), style="bold")


def draw(result: Result, figure: Figure) -> None:
    """Prefill time and peak memory over the prompt's length, side by side, with the fits as dashed lines.

    figure: an empty one, 720 × 360 points or more, made under `drawing.theme()`.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    from quantkit.evaluation.comparison.drawing import MUTED, SERIES

    panels = figure.subplots(1, 2)
    for place, name in enumerate(result.settings.implementations):
        rows = [row for row in result.rows if row.attention == name and not row.refused]
        style = {"color": SERIES[place % len(SERIES)], "marker": MARKS[place % len(MARKS)], "ms": 6}
        if rows:
            x = [row.length for row in rows]
            panels[0].plot(x, [statistics.median(row.seconds) for row in rows], label=name, **style)
            panels[0].vlines(
                x, [min(r.seconds) for r in rows], [max(r.seconds) for r in rows], color=style["color"], lw=1
            )
        told = [row for row in rows if row.prefill_bytes is not None]
        if told:
            panels[1].plot([r.length for r in told], [r.prefill_bytes for r in told], ls="", **style)
        if found := result.fits.get(name):
            low, high = min(r.length for r in told), max(r.length for r in told)
            grid = [low * (high / low) ** (step / 60) for step in range(61)]
            line = [(x, y) for x in grid if (y := found.at(x)) > 0]  # a logarithmic axis has no others
            panels[1].plot(*zip(*line, strict=True), color=style["color"], ls="--", lw=1)
    fitted = ", and a + b·N + c·N²" if result.fits else ", of too few lengths to be fitted"
    titles = ("Time of the prefill", f"Its memory{fitted}")
    lengths = sorted({row.length for row in result.rows})
    for axes, title, unit in zip(panels, titles, ("s", "B"), strict=True):
        axes.set_title(title, loc="left", color=MUTED)
        axes.set_xlabel("tokens of the prompt", loc="right")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(EngFormatter(unit))
        axes.yaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper left", ncols=max(1, len(result.settings.implementations)))
    if engine := figure.get_layout_engine():
        engine.set(h_pad=PADDING)
