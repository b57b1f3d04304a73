"""Where things stand in a drawn figure: its plot, its legend, and names that do not cover one another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len

from quantkit.evaluation.comparison.figures import Figure, Line, Series
from quantkit.evaluation.comparison.scale import scales

FONT = 12  # pixels
LETTER = 0.61 * FONT  # mean width of a character of a wide sans serif face
LINE = 18  # pixels from one line of text to the next
RADIUS = 5  # of a dot
LONGEST = 30  # characters of a name; the whole one is in the tooltip and in the table
BESIDE = (  # places for a name around its dot, the best first: (dx, dy, anchor)
    (9, 4, "start"),
    (-9, 4, "end"),
    (0, -11, "middle"),
    (0, 20, "middle"),
    (9, -9, "start"),
    (9, 18, "start"),
    (-9, -9, "end"),
    (-9, 18, "end"),
)


class Box(NamedTuple):
    """A rectangle in pixels, y growing downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True)
class Text:
    """x, y: where its baseline begins, has its middle or ends, as the anchor says. colour: of its series."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: int | None = None

    @property
    def box(self) -> Box:
        wide = width(self.text)
        left = self.x - {"start": 0, "middle": wide / 2, "end": wide}[self.anchor]
        return Box(left, self.y - FONT + 2, left + wide, self.y + 3)


class Frame:
    """A figure in a picture of `across` times `height` pixels: the rectangle of its plot in the middle.

    head: pixels kept free above everything. dot_names: beside the dots, where nothing else stands; dots for
    whose names there is no room are in the legend, as curves are.
    """

    def __init__(self, figure: Figure, across: int, height: int, head: int = 0):
        self.figure = figure
        self.width, self.height, self.head = across, height, head
        self.x, self.y = scales(figure)
        self.y_ticks = self.y.ticks(6)
        self.left = 10 + max((width(self.y.write(tick)) for tick in self.y_ticks), default=0)
        self.right = across - 22.0
        self.bottom = height - 2.2 * LINE
        listed: list[Series] = []
        while True:  # a legend takes room from the plot, which may leave more dots without a name
            self.legend = self._legend(listed)
            self.top = head + 14.0 + LINE * (len(self.legend) + 1)
            self.dot_names, unnamed = self._place_names(listed)
            if not unnamed:
                break
            listed += unnamed
        self.x_ticks = self._x_ticks()

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        return (
            self.left + (self.right - self.left) * self.x.place(x),
            self.bottom - (self.bottom - self.top) * self.y.place(y),
        )

    def _legend(self, listed: Sequence[Series]) -> list[list[tuple[float, Series]]]:
        """Joined series and those `listed` with their left ends, as many in a row as there is room for."""
        rows: list[list[tuple[float, Series]]] = []
        left = math.inf
        for series in self.figure.series:
            if series.joined or series in listed:
                wide = width(shortened(series.label)) + 40
                if left + wide > self.width:
                    rows.append([])
                    left = 8.0
                rows[-1].append((left, series))
                left += wide
        return rows

    def _x_ticks(self) -> list[float]:
        """As many as can be read beside each other."""
        for count in (8, 6, 5, 4, 3, 2):
            ticks = self.x.ticks(count)
            room = [self.at(tick, 0)[0] for tick in ticks]
            wide = max((width(self.x.write(tick)) for tick in ticks), default=0) + 10
            if all(b - a >= wide for a, b in zip(room, room[1:], strict=False)):
                return ticks
        return ticks[:1]

    def line_name(self, line: Line) -> Text:
        """The name of a dashed line: at its left end, or at its top on the side with more room."""
        name = shortened(line.label, 40)
        if line.axis == "y":
            _, y = self.at(0, line.value)
            return Text(self.left + 4, y - 5 if y - LINE > self.top else y + LINE - 4, name)
        x, _ = self.at(line.value, 0)
        right = x < (self.left + self.right) / 2
        return Text(x + 5 if right else x - 5, self.top + 12, name, "start" if right else "end")

    def _place_names(self, listed: Sequence[Series]) -> tuple[list[Text], list[Series]]:
        """Names beside the dots that are not `listed`, and dots for whose names there is no room.

        Those on the front choose first.
        """
        dots = sorted((one for one in self.figure.series if not one.joined), key=lambda one: one.hollow)
        taken, found, unnamed = self._drawn(dots), [], []
        for series in (one for one in dots if one not in listed):
            places = (text for text in self._names(series) if self._holds(text.box))
            text = next((text for text in places if not any(map(text.box.overlaps, taken))), None)
            if text:
                taken.append(text.box)
                found.append(text)
            else:
                unnamed.append(series)
        return found, unnamed

    def _drawn(self, dots: Sequence[Series]) -> list[Box]:
        """What a name must not cover: dots, dashed lines and their names, the front."""
        taken = [self.line_name(line).box for line in self.figure.lines]
        for line in self.figure.lines:
            x, y = self.at(line.value, 0) if line.axis == "x" else self.at(0, line.value)
            across = line.axis == "y"
            taken.append(Box(self.left, y, self.right, y) if across else Box(x, self.top, x, self.bottom))
        for series in dots:
            x, y = self.at(series.points[0].x, series.points[0].y)
            taken.append(Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS))
        corners = [self.at(*corner) for corner in self.figure.front]
        for (x, y), (beyond, below) in zip(corners, corners[1:], strict=False):
            taken += [Box(x, y - 1, beyond, y + 1), Box(beyond - 1, y, beyond + 1, below)]
        return taken

    def _names(self, series: Series) -> Iterator[Text]:
        """Where the name of a dot could stand, the best place first."""
        x, y = self.at(series.points[0].x, series.points[0].y)
        for dx, dy, anchor in BESIDE:
            yield Text(x + dx, y + dy, shortened(series.label), anchor, series.colour)

    def _holds(self, box: Box) -> bool:
        across = self.left <= box.left and box.right <= self.right
        return across and self.top <= box.top and box.bottom <= self.bottom


def width(text: str) -> float:
    """About how many pixels a text takes."""
    return LETTER * cell_len(text)


def shortened(text: str, longest: int = LONGEST) -> str:
    """The end of a long name: that is where names of one family differ."""
    return text if len(text) <= longest else "…" + text[1 - longest :]


def printable(text: str) -> str:
    """Text without what neither XML nor a font has a place for: control characters, lone surrogates."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
