"""Figures as PNG, drawn by matplotlib, which is the extra `plot`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.evaluation.comparison.figures import Figure, Series
from quantkit.evaluation.comparison.frame import FONT, LINE, Frame, Text, printable, shortened
from quantkit.evaluation.comparison.svg import LIGHT, shape

WIDTH, HEIGHT, DPI = 900, 550, 100  # pixels of the frame, of which there are DPI to an inch
POINTS = FONT * 72 / DPI
MARKERS = "osD^"  # as svg.shape numbers them
MUTED = "#59636e"


def check_available() -> None:
    """Raise QuantkitError unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise QuantkitError(
            "PNG plots are drawn by matplotlib, which is not installed",
            hint="pip install 'quantkit[plot]'; plots as .svg need nothing more",
            exit_code=UNSUPPORTED,
        )


def write(figure: Figure, path: Path) -> None:
    """One figure, 1440 × 880 pixels. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    frame = Frame(figure, WIDTH, HEIGHT, head=LINE)
    canvas = Canvas(figsize=(WIDTH / DPI, HEIGHT / DPI))
    FigureCanvasAgg(canvas)
    corner = frame.left / WIDTH, 1 - frame.bottom / HEIGHT
    size = (frame.right - frame.left) / WIDTH, (frame.bottom - frame.top) / HEIGHT
    axes = canvas.add_axes((*corner, *size))
    _axes(axes, frame)
    for line in figure.lines:
        (axes.axhline if line.axis == "y" else axes.axvline)(line.value, color=MUTED, ls="--", lw=1)
        _text(axes, frame, frame.line_name(line), MUTED)
    if len(figure.front) > 1:
        axes.step(*zip(*figure.front, strict=True), where="post", color=MUTED, lw=1)
    for series in figure.series:
        _series(axes, series)
    for text in frame.dot_names:
        _text(axes, frame, text, LIGHT[text.colour % len(LIGHT)])
    _legend(axes, frame)
    canvas.savefig(path, format="png", dpi=1.6 * DPI, metadata={"Software": None})


def _axes(axes, frame: Frame) -> None:
    """Ranges and ticks as they are in SVG."""
    figure = frame.figure
    _text(axes, frame, Text(8, LINE - 2, figure.title), "black")
    _text(axes, frame, Text(8, frame.top - 10, figure.y.label), MUTED)
    _text(axes, frame, Text(frame.right, frame.bottom + 2 * LINE - 4, figure.x.label, "end"), MUTED)
    sides = {"x": (figure.x, frame.x, frame.x_ticks), "y": (figure.y, frame.y, frame.y_ticks)}
    for name, (axis, scale, ticks) in sides.items():
        own = axes.xaxis if name == "x" else axes.yaxis
        if axis.log:
            getattr(axes, f"set_{name}scale")("log")
        ends = (10**end if axis.log else end for end in (scale.low, scale.high))
        getattr(axes, f"set_{name}lim")(*ends)
        own.set_ticks(ticks, [scale.write(tick) for tick in ticks], fontsize=POINTS)
        own.set_ticks([], minor=True)
    axes.tick_params(length=0, pad=5)
    axes.grid(color="#e3e6ea")
    axes.set_axisbelow(True)


def _legend(axes, frame: Frame) -> None:
    """Above the plot, where the frame keeps room for it."""
    for index, row in enumerate(frame.legend):
        y = frame.head + 14 + LINE * index
        for left, series in row:
            ends = [_share(frame, left + dx, y) for dx in (0, 10, 20)]
            colour = LIGHT[series.colour % len(LIGHT)]
            line = {"markersize": 4} if series.joined else {"ls": "none", **_dot(series, colour)}
            style = {"color": colour, "marker": MARKERS[shape(series)], "markevery": [1], **line}
            axes.plot(*zip(*ends, strict=True), transform=axes.transAxes, clip_on=False, **style)
            _text(axes, frame, Text(left + 26, y + 4, shortened(series.label)), "black")


def _series(axes, series: Series) -> None:
    colour = LIGHT[series.colour % len(LIGHT)]
    x, y = [point.x for point in series.points], [point.y for point in series.points]
    if series.joined:
        axes.plot(x, y, color=colour, marker=MARKERS[shape(series)], markersize=4)
        return
    (point,) = series.points
    if point.low is not None and point.high is not None:
        axes.vlines(point.x, point.low, point.high, color=colour)
    axes.plot(x, y, color=colour, marker="o", ls="none", **_dot(series, colour))


def _dot(series: Series, colour: str) -> dict[str, str]:
    """Full, or a ring."""
    return {"mfc": "white" if series.hollow else colour}


def _text(axes, frame: Frame, text: Text, colour: str) -> None:
    """A text at the place the frame gave it."""
    aligned = {"start": "left", "middle": "center", "end": "right"}[text.anchor]
    style = {"transform": axes.transAxes, "ha": aligned, "color": colour, "fontsize": POINTS}
    axes.text(*_share(frame, text.x, text.y), printable(text.text), parse_math=False, **style)


def _share(frame: Frame, x: float, y: float) -> tuple[float, float]:
    """A pixel as a share of the plot, from its lower left corner."""
    return (x - frame.left) / (frame.right - frame.left), (frame.bottom - y) / (frame.bottom - frame.top)
