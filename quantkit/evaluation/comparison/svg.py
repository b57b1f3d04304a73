"""Figures as SVG: text that stays text, both colour schemes, no script and nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import replace

from quantkit.evaluation.comparison.figures import Figure, Series
from quantkit.evaluation.comparison.frame import FONT, LINE, RADIUS, Frame, Text, printable, shortened

LIGHT = ("#1f6fb4", "#c2570c", "#0f7b5f", "#a8417e", "#6d5bb8", "#7a6a00", "#b3261e", "#3d7a8c")
DARK = ("#6cb2f0", "#f0995a", "#4fcba4", "#e58ac0", "#b3a4f2", "#d3c04c", "#f2857d", "#86c5d8")
DARK_SCHEME = "@media (prefers-color-scheme: dark)"


def _palette(colours: tuple[str, ...], ink: str, muted: str, faint: str, paper: str) -> str:
    own = "".join(f"--s{index}:{colour};" for index, colour in enumerate(colours))
    return f"{{{own}--ink:{ink};--muted:{muted};--faint:{faint};--paper:{paper}}}"


LIGHT_PALETTE = _palette(LIGHT, "#1b1f24", "#59636e", "#e3e6ea", "#ffffff")
DARK_PALETTE = _palette(DARK, "#e6e9ec", "#9aa4ae", "#30363d", "#14181d")
PLOT_STYLE = (
    f".plot text{{font:{FONT}px system-ui,sans-serif;fill:var(--ink);"
    "paint-order:stroke;stroke:var(--paper);stroke-width:3px}"
    ".plot .muted{fill:var(--muted)}.plot .name{fill:var(--c)}.plot .grid{stroke:var(--faint)}"
    ".plot .dashed{stroke:var(--muted);stroke-dasharray:4 4}.plot .front{stroke:var(--muted);fill:none}"
    ".plot .mark{fill:var(--c);stroke:var(--c);stroke-width:2}.plot .hollow{fill:var(--paper)}"
    ".plot .bar{stroke:var(--c)}.plot .curve{stroke:var(--c);fill:none;stroke-width:2}"
    + "".join(f".plot .c{index}{{--c:var(--s{index})}}" for index in range(len(LIGHT)))
)


def document(figure: Figure, width: int = 720, height: int = 440) -> str:
    """A file of its own, with its title in it."""
    frame = Frame(figure, width, height, head=LINE)
    style = f".plot{LIGHT_PALETTE}{DARK_SCHEME}{{.plot{DARK_PALETTE}}}{PLOT_STYLE}"
    background = f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
    title = _text(Text(8, LINE - 2, figure.title))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(
        frame, f"<style>{style}</style>{background}{title}"
    )


def draw(figure: Figure, width: int, height: int) -> str:
    """An `<svg>` element for a page that has PLOT_STYLE and a palette. Names are escaped."""
    return _svg(Frame(figure, width, height), "")


def _svg(frame: Frame, before: str) -> str:
    parts = [*_legend(frame), *_grid(frame), *_dashed(frame), *_front(frame), *_data(frame)]
    size = f'viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {size} role="img" '
        f'aria-label="{escape(frame.figure.title)}">{before}{"".join(parts)}</svg>\n'
    )


def escape(text: str) -> str:
    """Text as it is, whatever stands in it, for HTML and XML."""
    return html.escape(printable(text))


def _legend(frame: Frame) -> Iterator[str]:
    for index, row in enumerate(frame.legend):
        y = frame.head + 14 + LINE * index
        for left, series in row:
            curve = f'<path class="curve" d="M{left:.1f} {y}h20"/>' if series.joined else ""
            yield f'<g class="{_class(series.colour)}">{curve}{_mark(series, left + 10, y)}</g>'
            yield _text(Text(left + 26, y + 4, shortened(series.label)))
    yield _text(Text(8, frame.top - 10, frame.figure.y.label), "muted")


def _grid(frame: Frame) -> Iterator[str]:
    for tick in frame.y_ticks:
        _, y = frame.at(0, tick)
        yield f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        yield _text(Text(frame.left - 6, y + 4, frame.y.write(tick), "end"), "muted")
    for tick in frame.x_ticks:
        x, _ = frame.at(tick, 0)
        yield f'<path class="grid" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>'
        text = Text(x, frame.bottom + LINE - 2, frame.x.write(tick), "middle")
        beyond = max(0.0, text.box.right - frame.width + 2)
        yield _text(replace(text, x=x - beyond), "muted")
    yield _text(Text(frame.right, frame.bottom + 2 * LINE - 4, frame.figure.x.label, "end"), "muted")


def _dashed(frame: Frame) -> Iterator[str]:
    for line in frame.figure.lines:
        x, y = frame.at(line.value, line.value)
        across = f"M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"
        upwards = f"M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"
        yield f'<path class="dashed" d="{across if line.axis == "y" else upwards}"/>'
        yield _text(frame.line_name(line), "muted")


def _front(frame: Frame) -> Iterator[str]:
    """Steps: the best that can be had at a size or less."""
    corners = [frame.at(*corner) for corner in frame.figure.front]
    if len(corners) > 1:
        (x, y), *others = corners
        steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)
        yield f'<path class="front" d="M{x:.1f} {y:.1f}{steps}"/>'


def _data(frame: Frame) -> Iterator[str]:
    for series in frame.figure.series:
        places = [frame.at(point.x, point.y) for point in series.points]
        yield f'<g class="{_class(series.colour)}">'
        if series.joined and len(places) > 1:
            yield f'<path class="curve" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
        for point, (x, y) in zip(series.points, places, strict=True):
            if point.low is not None and point.high is not None:
                low, high = frame.at(point.x, point.low)[1], frame.at(point.x, point.high)[1]
                yield f'<path class="bar" d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
            yield f"<g><title>{escape(point.note)}</title>{_mark(series, x, y)}</g>"
        yield "</g>"
    yield from map(_text, frame.dot_names)


def _class(colour: int) -> str:
    return f"c{colour % len(LIGHT)}"


def shape(series: Series) -> int:
    """0 to 3: curves differ without colour, too, and those of one colour by it."""
    return (series.colour + series.colour // len(LIGHT)) % 4 if series.joined else 0


def _mark(series: Series, x: float, y: float) -> str:
    """A dot; on curves also a square, diamond or triangle."""
    r = RADIUS if not series.joined else 3.5
    kind = "mark hollow" if series.hollow else "mark"
    if shape(series) == 0:
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    corners = {
        1: ((-r, -r), (r, -r), (r, r), (-r, r)),
        2: ((0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)),
        3: ((0, -r - 1), (r, r), (-r, r)),
    }[shape(series)]
    path = "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners)
    return f'<path class="{kind}" d="M{path}Z"/>'


def _text(text: Text, kind: str = "") -> str:
    if text.colour is not None:
        kind = f"name {_class(text.colour)}"
    attributes = f' class="{kind}"' if kind else ""
    place = f'x="{text.x:.1f}" y="{text.y:.1f}" text-anchor="{text.anchor}"'
    return f"<text {place}{attributes}>{escape(text.text)}</text>"
