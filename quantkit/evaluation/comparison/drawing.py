"""Plots drawn with matplotlib: as SVG with real text for light and dark schemes, or as PNG."""

import html
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator

from quantkit.evaluation.comparison import figures
from quantkit.evaluation.comparison.figures import Figure, Series

SERIES = ("#1f6fb4", "#c2570c", "#0f7b5f", "#a8417e", "#6d5bb8", "#7a6a00", "#b3261e", "#3d7a8c")
INK, MUTED, FAINT, PAPER = "#1b1f24", "#59636e", "#e3e6ea", "#ffffff"
# Dark schemes invert lightness, to the dark grey of the page, and keep hues.
CSS = "@media (prefers-color-scheme: dark){.plot{filter:invert(.9) hue-rotate(180deg)}}"
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # matplotlib writes these by default
NOTE = "note: "  # prefix of the ids of marks; the SVG shows the rest as tooltip
FILE = 720, 440  # pixels of a plot in a file of its own
PIXELS = 72  # per inch: one point is one pixel
LONGEST_LABEL = 30  # maximum characters of a name; tooltip and table show all
NAME, ROW = 220, 17  # pixels of a name in a legend
TICK = 75  # pixels of a tick's label on the x axis, such as `125 MB`
LABEL_GAP = 3  # pixels between a dashed line and its label
MARKS = "osD^"
COVER = {"fc": PAPER, "lw": 0, "pad": 0}  # background of a label: hides curves but no marks
STYLE = {
    "figure.dpi": PIXELS, "font.size": 12, "axes.titlesize": 12, "axes.labelsize": 12, "xtick.labelsize": 12,
    "ytick.labelsize": 12, "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": MUTED,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "axes.grid": True, "grid.color": FAINT, "axes.axisbelow": True, "axes.edgecolor": FAINT,
    "axes.xmargin": 0.06, "axes.ymargin": 0.06, "text.parse_math": False, "axes.facecolor": "none",
    "legend.frameon": False, "legend.borderpad": 0.2, "legend.columnspacing": 1.2,
    "legend.handlelength": 1.6, "legend.handletextpad": 0.5, "legend.title_fontsize": 13,
    "svg.fonttype": "none",
}  # fmt: skip


def svg(figure: Figure, width: int, height: int, titled: bool = False) -> str:
    """Return an `<svg>` element for a page with `CSS`. Names are escaped."""
    with theme({"svg.hashsalt": f"{figure.key} {width}"}):  # ids that no other figure has
        canvas = draw(figure, width, height, titled)
        canvas.savefig(file := StringIO(), format="svg", facecolor="none", metadata=NO_METADATA)
    text = file.getvalue()
    text = re.sub(f'<g id="{NOTE}([^"]*)">', r"<g><title>\1</title>", text[text.index("<svg ") :])
    label = html.escape(shown(figure.title))
    return text.replace("<svg ", f'<svg class="plot" role="img" aria-label="{label}" ', 1)


@contextmanager
def theme(more: dict[str, str] | None = None) -> Iterator[None]:
    """Set matplotlib's style during the context; warnings about missing glyphs are off. more: settings."""
    with matplotlib.rc_context(STYLE | (more or {})), warnings.catch_warnings(action="ignore"):
        yield


def document(figure: Figure) -> str:
    """Return the text of an SVG file with title and both colour schemes."""
    first, rest = svg(figure, *FILE, titled=True).split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{first}><style>{CSS}</style>{rest}\n'


def png(figure: Figure, path: Path) -> None:
    """Write a light PNG file of twice the size. Raises OSError."""
    with theme():
        draw(figure, *FILE, titled=True).savefig(path, dpi=2 * PIXELS, metadata={"Software": None})


def draw(figure: Figure, width: int, height: int, titled: bool) -> Canvas:
    """Return a canvas with the plot. The legend above the plot adds to `height` (pixels)."""
    columns = max(1, width // NAME)
    tall = height + ROW * -(-len(figure.series) // columns)
    canvas = Canvas((width / PIXELS, tall / PIXELS), layout="constrained")
    _plot(canvas.add_subplot(), figure)
    handles = [
        Line2D([], [], label=shortened(s.label), ls="-" if s.joined else "", **_mark(s))
        for s in figure.series
    ]
    title = figure.title if titled else ""
    canvas.legend(handles=handles, title=title, loc="outside upper left", ncols=columns, alignment="left")
    return canvas


def _plot(axes: Axes, figure: Figure) -> None:
    axes.set_title(shown(figure.y.label), loc="left")
    axes.set_xlabel(shown(figure.x.label), loc="right")
    for line in figure.lines:
        if line.axis == "x":
            axes.axvline(line.value, color=MUTED, ls="--", lw=1)
            at, where, offset = (line.value, 0.99), axes.get_xaxis_transform(), (-LABEL_GAP, 0)
            style = {"ha": "right", "va": "top", "rotation": 90}
        else:
            axes.axhline(line.value, color=MUTED, ls="--", lw=1)
            at, where, offset = (0.01, line.value), axes.get_yaxis_transform(), (0, LABEL_GAP)
            style = {"va": "bottom"}
        style |= {"textcoords": "offset points", "color": MUTED, "bbox": COVER}
        axes.annotate(shortened(line.label), at, offset, where, **style)
    if len(figure.front) > 1:  # steps: the lowest loss at a size or less
        axes.step(*zip(*figure.front, strict=True), where="post", color=MUTED, lw=1)
    for series in figure.series:
        if series.joined:
            axes.plot([p.x for p in series.points], [p.y for p in series.points], c=_colour(series))
        for point in series.points:
            if point.low is not None and point.high is not None:
                axes.vlines(point.x, point.low, point.high, color=_colour(series), lw=1)
            axes.plot(point.x, point.y, gid=NOTE + shown(point.note), ls="", zorder=4, **_mark(series))
    for axis, description in ((axes.xaxis, figure.x), (axes.yaxis, figure.y)):
        _scale(axes, axis, description)


def _scale(axes: Axes, axis: Axis, description: figures.Axis) -> None:
    """Set scale and ticks. Without `description.ticks` they are round values; on a logarithmic axis powers of
    ten, and 2 and 5 times these if the axis is short."""
    axes.set(**{f"{axis.axis_name}scale": "log" if description.log else "linear"})
    low, high = axis.get_view_interval()
    most = int(axes.figure.bbox.width // TICK) if axis is axes.xaxis else 9
    if description.ticks:
        axis.set_major_locator(FixedLocator(description.ticks, nbins=most))
    elif description.log:
        axis.set_major_locator(LogLocator(subs=(1,) if high > 200 * low else (1, 2, 5), numticks=8))
    else:
        steps, whole = [1, 2, 2.5, 5, 10], description.kind == "whole"
        axis.set_major_locator(MaxNLocator(min(most, 9), steps=steps, integer=whole))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        EngFormatter("B") if description.kind == "bytes" else lambda value, _: f"{value:g}"
    )


def _colour(series: Series) -> str:
    return SERIES[series.colour % len(SERIES)]


def _mark(series: Series) -> dict:
    """Return matplotlib's settings for a series' mark; series with equal colours have different marks."""
    colour, again = _colour(series), series.colour // len(SERIES)
    if not series.joined:
        filled = PAPER if series.hollow else colour
        return {"c": colour, "marker": MARKS[again % 4], "ms": 9, "mew": 2, "mfc": filled}
    return {"c": colour, "marker": MARKS[(series.colour + again) % 4], "ms": 6}


def shortened(text: str) -> str:
    """Return a name, cut at its beginning if it is long, since names mostly differ at the end."""
    text = shown(text)
    return text if len(text) <= LONGEST_LABEL else "…" + text[1 - LONGEST_LABEL :]


def shown(text: str) -> str:
    """Return the text with characters that cannot be printed replaced; XML does not allow them."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
