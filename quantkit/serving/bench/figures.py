"""What the plots of a benchmark show, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from quantkit.evaluation.comparison.columns import number
from quantkit.evaluation.comparison.figures import Axis, Figure, Line, Point, Series
from quantkit.serving.bench.columns import figure as shown
from quantkit.serving.bench.columns import milliseconds
from quantkit.serving.bench.roofline import Roof
from quantkit.tables import megabytes

Record = dict[str, Any]
STEPS = 64  # of a predicted curve
DECODE = "new tokens per second, all sequences together"


def figures(record: Record) -> list[Figure]:
    """Every plot there is something to draw for: by batch, against quality or size, by prompt length."""
    asked = record["settings"]
    made = []
    if len(asked["batches"]) > 1:
        made += [by_batch(record, prompt) for prompt in asked["prompts"]]
    made.append(against(record))
    if len(asked["prompts"]) > 1:
        made.append(by_prompt(record))
    return [figure for figure in made if figure and figure.series]


def _ran(model: Record, **at: int) -> Iterator[Record]:
    """Points with these settings that ran."""
    for point in model["points"]:
        if point["error"] is None and all(point[key] == value for key, value in at.items()):
            yield point


def _speed(model: Record, point: Record, x: float) -> Point:
    told = point["decode"]["tokens_per_second"]
    note = (
        f"{model['label']}, {point['batch']} × {point['prompt']} tokens: {shown(told['median'])} tokens/s "
        f"({shown(told['min'])} to {shown(told['max'])})"
    )
    return Point(x, told["median"], told["min"], told["max"], note)


def by_batch(record: Record, prompt: int) -> Figure:
    """Throughput over batch, measured, under the roofline."""
    batches = record["settings"]["batches"]
    series, lines = [], []
    for index, model in enumerate(record["models"]):
        points = tuple(_speed(model, point, point["batch"]) for point in _ran(model, prompt=prompt))
        if not points:
            continue
        series.append(Series(model["label"], points, index, joined=True))
        found = next(row for row in model["roofline"] if row["prompt"] == prompt)
        if found["predicted"]:
            curve = tuple(_curve(found["predicted"], batches[0], batches[-1]))
            series.append(Series(model["label"], curve, index, joined=True, bare=True))
        if found["measured"] and len(record["models"]) == 1:
            lines.append(_knee("measured b*", found["measured"]["optimal_batch"]))
        if found["predicted"] and len(record["models"]) == 1:
            lines.append(_knee("predicted b*", found["predicted"]["optimal_batch"]))
    inside = [line for line in lines if batches[0] <= line.value <= batches[-1]]
    return Figure(
        key=f"batch-{prompt}",
        title=f"Throughput by batch, {prompt} prompt tokens",
        caption="Bars: least and most of all runs. Dashed: the roofline of each, what reading the weights "
        "and the cache once a step and multiplying by them allow.",
        x=Axis("sequences at once", "whole", log=True, ticks=tuple(batches)),
        y=Axis(DECODE, log=True),
        series=tuple(series),
        lines=tuple(inside),
    )


def _knee(name: str, batch: float) -> Line:
    return Line(f"{name} {shown(batch)}", "x", batch)


def _curve(predicted: Record, low: int, high: int) -> Iterator[Point]:
    keys = ("weight_bytes", "cache_bytes", "active", "bandwidth", "flops")
    roof = Roof(**{key: predicted[key] for key in keys})
    for step in range(STEPS + 1):
        batch = math.exp(math.log(low) + step / STEPS * math.log(high / low))
        yield Point(batch, batch / roof.seconds(batch))


def against(record: Record) -> Figure | None:
    """Speed against KL divergence where that is known of two models or more, else against size."""
    if len(record["models"]) < 2:
        return None
    known = [model for model in record["models"] if model["quality"] and model["quality"]["kld"]]
    kld = bool(known)
    first = record["models"][0]["points"][0]
    series, lines = [], []
    for index, model in enumerate(record["models"]):
        for point in _ran(model, batch=first["batch"], prompt=first["prompt"]):
            made = _speed(model, point, model["size"]["weight_bytes"])
            if not kld:
                series.append(Series(model["label"], (made,), index, joined=False))
            elif model in known:
                loss = model["quality"]["kld"]
                note = f"{made.note}, KL divergence {number(loss)}, {megabytes(made.x)}"
                series.append(Series(model["label"], (Point(made.y, loss, note=note),), index, joined=False))
            elif index == 0:
                lines.append(Line(f"{model['label']}, {shown(made.y)}/s", "x", made.y))
    what = f"Batch {first['batch']}, {first['prompt']} prompt tokens."
    if kld:
        return Figure(
            key="quality",
            title="Quality against speed",
            caption=f"{what} To the right is faster, below is nearer to the original.",
            x=Axis(DECODE, log=True),
            y=Axis("KL divergence, nats per token", log=True),
            series=tuple(series),
            lines=tuple(lines),
        )
    return Figure(
        key="size",
        title="Speed against size",
        caption=f"{what} Bars: least and most of all runs.",
        x=Axis("size of all tensors", "bytes"),
        y=Axis(DECODE, log=True),
        series=tuple(series),
    )


def by_prompt(record: Record) -> Figure:
    """Time to the first token over prompt length, at the smallest batch."""
    batch = record["settings"]["batches"][0]
    series = []
    for index, model in enumerate(record["models"]):
        points = []
        for point in _ran(model, batch=batch):
            told = point["prefill"]["seconds"]
            note = f"{model['label']}, {point['prompt']} tokens: {milliseconds(told['median'])} ms"
            points.append(
                Point(point["prompt"], 1000 * told["median"], 1000 * told["min"], 1000 * told["max"], note)
            )
        if points:
            series.append(Series(model["label"], tuple(points), index, joined=True))
    return Figure(
        key="prompt",
        title="Time to the first token",
        caption=f"Batch {batch}. Bars: least and most of all runs.",
        x=Axis("prompt tokens", "whole", log=True, ticks=tuple(record["settings"]["prompts"])),
        y=Axis("milliseconds", log=True),
        series=tuple(series),
    )
