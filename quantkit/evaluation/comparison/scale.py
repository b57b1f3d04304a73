"""From values to places on an axis: ranges, ticks and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.comparison.figures import Axis, Figure

PADDING = 0.06  # of the axis, on both sides
MOST_DECADES = 12  # of a logarithmic axis: what lies deeper is drawn at its end


@dataclass(frozen=True)
class Scale:
    """One axis, `low` to `high` in its own values; log10 of them where it is logarithmic."""

    axis: Axis
    low: float
    high: float

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        at = math.log10(max(value, 1e-300)) if self.axis.log else value
        return min(1.0, max(0.0, (at - self.low) / (self.high - self.low)))

    def ticks(self, count: int) -> list[float]:
        """About `count` round values inside the range."""
        if not self.axis.log:
            return _round_values(self.low, self.high, count, self.axis.kind == "whole")
        for steps in ((1,), (1, 2, 5)):
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            ticks = [step * 10.0**decade for decade in decades for step in steps]
            ticks = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
            if len(ticks) > 2:
                return ticks[:: math.ceil(len(ticks) / (count + 2))]
        return _round_values(10**self.low, 10**self.high, count, self.axis.kind == "whole")

    def write(self, value: float) -> str:
        """A tick as people read it."""
        if self.axis.kind == "bytes":
            unit, name = next(
                (u for u in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if abs(self.high) >= u[0]),
                (1.0, "B"),
            )
            return f"{value / unit:g} {name}"
        return f"{value:g}"


def _round_values(low: float, high: float, count: int, whole: bool) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count
    decade = 10.0 ** math.floor(math.log10(raw))
    step = next(m * decade for m in (1, 2, 2.5, 5, 10) if m * decade >= raw * 0.999)
    if whole:
        step = max(1, math.ceil(step))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def scales(figure: Figure) -> tuple[Scale, Scale]:
    """Ranges that hold every point, error bar and line of a figure."""
    points = [point for series in figure.series for point in series.points]
    x = [point.x for point in points] + [line.value for line in figure.lines if line.axis == "x"]
    y = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    y += [line.value for line in figure.lines if line.axis == "y"]
    return _scale(figure.x, x), _scale(figure.y, y)


def _scale(axis: Axis, values: Sequence[float]) -> Scale:
    if axis.log:
        values = [math.log10(max(value, 1e-300)) for value in values]
        values = [max(value, max(values) - MOST_DECADES) for value in values]
    low, high = min(values), max(values)
    least = 0.3 if axis.log else max(abs(high) * 0.1, 1e-9)  # wide enough to have ticks
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    pad = PADDING * (high - low)
    return Scale(axis, low - pad, high + pad)
