"""Descriptions of plots, which drawing.py draws."""

from dataclasses import dataclass

from quantkit.evaluation.comparison.columns import LOSS_NAMES, estimate, label_by_source, number
from quantkit.evaluation.comparison.gates import look_up
from quantkit.tables import megabytes

KLD, KLD_AXIS = "metrics.kld.mean", "KL divergence, nats per token"


@dataclass(frozen=True)
class Point:
    """A point of a plot. low, high: ends of its error bar, if any. note: text of the tooltip."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """The points of one model. joined: draw a line through the points.

    colour: index into a palette. hollow: draw rings.
    """

    label: str
    points: tuple[Point, ...]
    colour: int
    joined: bool
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis. kind: number, bytes or whole. ticks: values of the ticks; if empty, round values."""

    label: str
    kind: str = "number"
    log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Line:
    """A dashed line across the plot. axis: `x` or `y`; value: where the line crosses this axis."""

    label: str
    axis: str
    value: float


@dataclass(frozen=True)
class Figure:
    """A plot. key: a word for file names. lines: across the plot. front: points of the Pareto front, sorted
    by x. bars: a sentence on the error bars."""

    key: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    lines: tuple[Line, ...] = ()
    front: tuple[tuple[float, float], ...] = ()
    bars: str = ""

    def described(self) -> str:
        """Return the caption, with the sentence on error bars if there are any."""
        points = (point for series in self.series for point in series.points)
        drawn = any(p.low is not None and p.low < p.high for p in points)
        return f"{self.caption} {self.bars}" if drawn else self.caption


def quality(record: dict) -> Figure:
    """Return the plot of loss against size. The first model, whose divergence is 0, is a line, since the axis
    is logarithmic."""
    loss, front = record["pareto"]["loss"], set(record["pareto"]["models"])
    kld, labels = loss == KLD, label_by_source(record)
    series, absent, lines = [], [], []
    for position, model in enumerate(record["models"]):
        size, value = float(model["size"]["weight_bytes"]), look_up(model, loss)
        name = labels[model["source"]]
        if kld and position == 0:
            lines.append(Line(f"{name}, {megabytes(size)}", "x", size))
        elif value is None or (kld and value <= 0):
            absent.append(f"{name} ({number(value)})")
        else:
            stderr = look_up(model, "metrics.kld.stderr" if kld else "metrics.dppl.stderr")
            text = f"{name}: {megabytes(size)}, " + (
                f"KL divergence {number(value)}" if kld else f"perplexity {estimate(model['metrics']['ppl'])}"
            )
            ends = (max(value - stderr, value / 10), value + stderr) if stderr else ()
            point = Point(size, value, *ends, note=text)
            hollow = model["source"] not in front
            series.append(Series(name, (point,), position, False, hollow))
    floor = look_up(record["noise_floor"] or {}, loss)
    if kld and floor and floor > 0:
        lines.append(Line(f"noise floor, {record['noise_floor']['dtype']}", "y", floor))
    corners = sorted((s.points[0].x, s.points[0].y) for s in series if not s.hollow)
    caption = f"Filled: on the Pareto front, no other model is as small with as low a {LOSS_NAMES[loss]}."
    if any(one.hollow for one in series):
        caption += " Ring: not on the front."
    if absent:
        caption += f" Not drawn: {', '.join(absent)}."
    return Figure(
        key="quality",
        title="Quality against size",
        caption=caption,
        x=Axis("size of all tensors", "bytes"),
        y=Axis(KLD_AXIS if kld else LOSS_NAMES[loss], log=kld),
        series=tuple(series),
        lines=tuple(lines),
        front=tuple(corners),
        bars="Bars: one standard error" + ("." if kld else " of the difference to the first model."),
    )
