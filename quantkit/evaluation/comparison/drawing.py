"""Figures drawn by matplotlib: SVG whose text stays text, in both colour schemes, and PNG."""

from __future__ import annotations

import html
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from quantkit.evaluation.comparison import figures
from quantkit.evaluation.comparison.figures import Figure, Line, Point, Series

SERIES = ("#1f6fb4", "#c2570c", "#0f7b5f", "#a8417e", "#6d5bb8", "#7a6a00", "#b3261e", "#3d7a8c")
INK, MUTED, FAINT, PAPER = "#1b1f24", "#59636e", "#e3e6ea", "#ffffff"
LIGHT = (*SERIES, INK, MUTED, FAINT, PAPER)
DARK = ("#6cb2f0", "#f0995a", "#4fcba4", "#e58ac0", "#b3a4f2", "#d3c04c", "#f2857d", "#86c5d8",
        "#e6e9ec", "#9aa4ae", "#30363d", "#14181d")  # fmt: skip
NAMES = (*(f"s{index}" for index in range(len(SERIES))), "ink", "muted", "faint", "paper")
LIGHT_PALETTE, DARK_PALETTE = (
    "{" + "".join(f"--{name}:{colour};" for name, colour in zip(NAMES, colours, strict=True)) + "}"
    for colours in (LIGHT, DARK)
)
VARIABLES = {colour: f"var(--{name})" for name, colour in zip(NAMES, LIGHT, strict=True)}
DARK_SCHEME = "@media (prefers-color-scheme: dark)"
PLOT_STYLE = (
    ".plot *{stroke-linejoin:round}.plot text{font:12px system-ui,sans-serif;"
    "paint-order:stroke;stroke:var(--paper);stroke-width:3px}"
)
UNTOLD = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # metadata that SVG gets by default
PIXELS = 72  # to an inch, as SVG counts: a point is a pixel
LONGEST = 30  # characters of a name; the whole one is in the tooltip and in the table
BESIDE = (  # places for a name around its dot, the best first: (dx, dy, anchor)
    (8, 0, "left"), (-8, 0, "right"), (0, 12, "center"), (0, -12, "center"),
    (8, 10, "left"), (8, -10, "left"), (-8, 10, "right"), (-8, -10, "right"),
)  # fmt: skip
STYLE = {
    "figure.dpi": PIXELS, "font.size": 12, "axes.titlesize": 12, "axes.labelsize": 12, "xtick.labelsize": 12,
    "ytick.labelsize": 12, "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": MUTED,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.grid": True, "grid.color": FAINT, "axes.axisbelow": True, "axes.edgecolor": FAINT,
    "axes.xmargin": 0.06, "axes.ymargin": 0.06, "text.parse_math": False,
    "legend.frameon": False, "legend.borderpad": 0.2, "legend.columnspacing": 1.2,
    "legend.handlelength": 1.6, "legend.handletextpad": 0.5, "legend.title_fontsize": 13,
    "svg.fonttype": "none",
}  # fmt: skip


def svg(figure: Figure, width: int, height: int, titled: bool = False) -> str:
    """An `<svg>` element for a page that has PLOT_STYLE and a palette. Names are escaped."""
    with theme({"svg.hashsalt": f"{figure.key} {width}"}):  # ids of their own beside other figures
        text = element(draw(figure, width, height, titled), figure.title)
    for name, point in _noted(figure):
        text = text.replace(f'<g id="{name}">', f"<g><title>{_escape(point.note)}</title>")
    return text


def element(canvas: Canvas, title: str) -> str:
    """Any canvas as such an element; to be called under `theme`."""
    canvas.savefig(file := StringIO(), format="svg", metadata=UNTOLD)
    text = file.getvalue()
    text = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.S)
    text = re.sub(r"<[^>]*>\s*", _tidy, text)
    return text.replace("<svg ", f'<svg class="plot" role="img" aria-label="{_escape(title)}" ', 1)


def _tidy(tag: re.Match) -> str:
    """A tag with the page's fonts and colours, in lengths of a hundredth of a pixel."""
    text = re.sub(r"\s+", " ", tag[0]).strip()
    text = re.sub(r'font(-size|-family)?: [^;"]*; | transform="rotate\(-0 [^"]*"|(?<=\d)pt(?=")', "", text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    return re.sub("#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], colour[0]), text)


@contextmanager
def theme(more: dict[str, str] | None = None) -> Iterator[None]:
    """matplotlib as it should draw here, silent about letters that its font has not."""
    with matplotlib.rc_context(STYLE | (more or {})), warnings.catch_warnings(action="ignore"):
        yield


def document(figure: Figure, width: int = 720, height: int = 440) -> str:
    """A file of its own, with its title and both colour schemes in it."""
    return standalone(svg(figure, width, height, titled=True))


def standalone(drawn: str) -> str:
    """A file of an `<svg>` element, with both colour schemes in it."""
    style = f"<style>.plot{LIGHT_PALETTE}{DARK_SCHEME}{{.plot{DARK_PALETTE}}}{PLOT_STYLE}</style>"
    first, rest = drawn.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{first}>{style}{rest}\n'


def png(figure: Figure, path: Path) -> None:
    """A file of 1440 × 880 pixels, light. Raises OSError."""
    with theme():
        draw(figure, 720, 440, titled=True).savefig(path, dpi=2 * PIXELS, metadata={"Software": None})


def draw(figure: Figure, width: int, height: int, titled: bool) -> Canvas:
    """A canvas of so many pixels. Dots for whose names there is no room are in the legend, as curves are."""
    listed = [series for series in figure.series if series.joined and not series.bare]
    while True:  # a legend takes room from the plot, which may leave more dots without a name
        canvas = Canvas((width / PIXELS, height / PIXELS), layout="constrained")
        axes = canvas.add_subplot()
        _plot(axes, figure)
        _legend(canvas, figure.title if titled else "", listed)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        unnamed = _name(
            axes, figure, [series for series in figure.series if not (series.bare or series in listed)]
        )
        if not unnamed:
            return canvas
        listed += unnamed


def _plot(axes: Axes, figure: Figure) -> None:
    axes.set_title(shown(figure.y.label), loc="left")
    axes.set_xlabel(shown(figure.x.label), loc="right")
    for axis, own in ((axes.xaxis, figure.x), (axes.yaxis, figure.y)):
        _scale(axes, axis, own)
    for line in figure.lines:
        along = axes.axhline if line.axis == "y" else axes.axvline
        along(line.value, color=MUTED, ls="--", lw=1)
    if len(figure.front) > 1:  # steps: the best that can be had at a size or less
        axes.step(*zip(*figure.front, strict=True), where="post", color=MUTED, lw=1)
    for series in figure.series:
        if series.joined:
            style = {"ls": "--", "lw": 1} if series.bare else {}
            axes.plot([p.x for p in series.points], [p.y for p in series.points], c=_colour(series), **style)
        for point in series.points:
            if point.low is not None and point.high is not None:
                axes.vlines(point.x, point.low, point.high, color=_colour(series), lw=1)
    marks = [series for series in figure.series if not series.bare for _ in series.points]
    for series, (name, point) in zip(marks, _noted(figure), strict=True):
        axes.plot(point.x, point.y, gid=name, ls="", **_mark(series))


def _noted(figure: Figure) -> Iterator[tuple[str, Point]]:
    """Every point that has a mark, and the id of that."""
    points = itertools.chain.from_iterable(series.points for series in figure.series if not series.bare)
    return ((f"point-{index}", point) for index, point in enumerate(points))


def _scale(axes: Axes, axis: Axis, own: figures.Axis) -> None:
    axes.set(**{f"{axis.axis_name}scale": "log" if own.log else "linear"})
    axis.set_major_locator(FixedLocator(own.ticks) if own.ticks else _Round(own))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter("B") if own.kind == "bytes" else lambda value, _: f"{value:g}")


class _Round(MaxNLocator):
    """Round values; on a logarithmic axis powers of ten, and between few of them 2 and 5 times these."""

    def __init__(self, own: figures.Axis):
        super().__init__("auto", steps=[1, 2, 2.5, 5, 10], integer=own.kind == "whole")
        self.log = own.log

    def tick_values(self, low: float, high: float) -> Sequence[float]:
        for steps in ((1,), (1, 2, 5)) if self.log else ():
            found = LogLocator(subs=steps, numticks=8).tick_values(low, high)
            inside = [value for value in found if low <= value <= high]
            if len(inside) > 2:
                return inside
        return super().tick_values(low, high)


def _colour(series: Series) -> str:
    return SERIES[series.colour % len(SERIES)]


def _mark(series: Series) -> dict:
    """A dot or a ring; curves differ without colour, too, and those of one colour by their marks."""
    colour = _colour(series)
    if not series.joined:
        return {"c": colour, "marker": "o", "ms": 9, "mew": 2, "mfc": PAPER if series.hollow else colour}
    return {"c": colour, "marker": "osD^"[(series.colour + series.colour // len(SERIES)) % 4], "ms": 6}


def _legend(canvas: Canvas, title: str, listed: Sequence[Series]) -> None:
    """Above the plot, in as many columns as there is room for."""
    handles = [
        Line2D([], [], label=shortened(s.label), ls="-" if s.joined else "", **_mark(s)) for s in listed
    ]
    for columns in range(max(1, len(handles)), 0, -1):
        legend = canvas.legend(
            handles=handles, title=title, loc="outside upper left", ncols=columns, alignment="left"
        )
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()


def _name(axes: Axes, figure: Figure, dots: Sequence[Series]) -> list[Series]:
    """Name dashed lines and dots where the names cover nothing; the dots for which there is no such place.

    Those on the front choose first.
    """
    taken = [*_drawn(axes, figure), *(_name_line(axes, line).get_window_extent() for line in figure.lines)]
    unnamed = []
    for series in sorted(dots, key=lambda one: one.hollow):
        (point,) = series.points
        for dx, dy, anchor in BESIDE:
            style = {"ha": anchor, "va": "center_baseline", "color": _colour(series)}
            text = _text(axes, series.label, (point.x, point.y), (dx, dy), axes.transData, style)
            box = text.get_window_extent()
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            if inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()
        else:
            unnamed.append(series)
    return unnamed


def _name_line(axes: Axes, line: Line) -> Text:
    """At the left end of a dashed line, or at its top on the side with more room."""
    x, y = axes.transAxes.inverted().transform(axes.transData.transform((line.value, line.value)))
    if line.axis == "y":
        above = y < 0.9
        place, style = (4, 3 if above else -3), {"va": "bottom" if above else "top"}
        return _text(axes, line.label, (0, y), place, axes.transAxes, style)
    place, style = ((5, -3), {"ha": "left"}) if x < 0.5 else ((-5, -3), {"ha": "right"})
    return _text(axes, line.label, (x, 1), place, axes.transAxes, {"va": "top", **style})


def _text(axes: Axes, text: str, at: tuple, offset: tuple, coordinates, style: dict) -> Text:
    style = {"color": MUTED, "xycoords": coordinates, "textcoords": "offset points", **style}
    return axes.annotate(shortened(text), at, offset, annotation_clip=False, **style)


def _drawn(axes: Axes, figure: Figure) -> Iterator[Bbox]:
    """What a name must not cover: dots, dashed lines, the front."""
    at, plot = axes.transData.transform, axes.bbox
    for line in figure.lines:
        x, y = at((line.value, line.value))
        yield Bbox([(plot.x0, y), (plot.x1, y)] if line.axis == "y" else [(x, plot.y0), (x, plot.y1)])
    for series in figure.series:
        if not series.joined:
            yield Bbox([at((series.points[0].x, series.points[0].y))] * 2).padded(5)
    for (x, y), (beyond, below) in itertools.pairwise(map(at, figure.front)):
        yield Bbox([(x, y), (beyond, y)]).padded(1)
        yield Bbox([(beyond, below), (beyond, y)]).padded(1)


def shortened(text: str) -> str:
    """The end of a long name: that is where names of one family differ."""
    text = shown(text)
    return text if len(text) <= LONGEST else "…" + text[1 - LONGEST :]


def shown(text: str) -> str:
    """Text without what neither XML nor a font has a place for: control characters, lone surrogates."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _escape(text: str) -> str:
    return html.escape(shown(text))
