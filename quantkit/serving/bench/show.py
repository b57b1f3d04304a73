"""A benchmark for people: what each checkpoint weighs, loses and costs, as a table, a page and plots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantkit.errors import count, name_all
from quantkit.evaluation.comparison.columns import NOTHING, bits, number
from quantkit.evaluation.comparison.figures import Axis, Figure, Line, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.serving.bench.roofline import Roof
from quantkit.tables import figure, megabytes, size

Record = dict[str, Any]
NOISY = 0.1  # median deviation from which on people are warned
STEPS = 65  # points of a predicted curve
DECODE = "new tokens per second, all sequences together"
MEANINGS = {  # of the columns; an evaluation brings two, several models a ratio
    "engine": "and whose kernels multiply; decoded: the weights are codes on disk, but not as they run",
    "size": "of all tensors, as stored",
    "bits": "per weight, over the whole model",
    "KL div.": "KL divergence from the first model of --quality",
    "ppl": "perplexity of --quality",
    "decode/s": "new tokens a second after the first, of all sequences together (median)",
    "ratio": "decode/s as a multiple of the first model's, in this run",
    "±": "median deviation of decode/s between runs",
    "prefill/s": "prompt tokens a second, of all sequences together (median)",
    "first ms": "milliseconds until every sequence has its first token (median)",
    "token ms": "milliseconds from a sequence's token to its next (median)",
    "p90": "milliseconds that nine of ten such steps stay below",
    "weights": "as they lie in memory",
    "KV": "keys and values at the end of a run",
    "peak": "of memory in a run: see the foot",
}


def report(record: Record, quiet: bool = False) -> Report:
    """All there is to show. quiet: without what the figures hold for."""
    models, asked = record["models"], record["settings"]
    absent = set() if record["quality"] else {"KL div.", "ppl"}
    absent |= set() if len(models) > 1 else {"ratio"}
    meanings = {header: meaning for header, meaning in MEANINGS.items() if header not in absent}
    points = models[0]["points"] if models else ()
    groups = []
    for index, point in enumerate(points):
        rows = [_cells(model, model["points"][index]) for model in models]
        heading = called(point) if len(points) > 1 else ""
        groups.append(
            (heading, [[row["model"], *(row.get(key, NOTHING) for key in meanings)] for row in rows])
        )
    labels = [model["label"] for model in models]
    notes = [(f"not run: {line}", "yellow") for line in failures(record)]
    notes += [(f"noisy: {line}", "yellow") for line in noise(record)]
    notes += [(line, "") for line in best_batches(record)]
    notes += [] if quiet else [(line, "dim") for line in protocol(record)]
    drawn = [by_batch(record, prompt) for prompt in asked["prompts"]] if len(asked["batches"]) > 1 else []
    drawn += [against(record)] if len(models) > 1 else []
    drawn += [by_prompt(record)] if len(asked["prompts"]) > 1 else []
    return Report(
        title=f"What {', '.join(labels) if len(labels) < 4 else f'{len(labels)} models'} cost to run",
        tables=[Table(["model", *meanings], groups, meanings)],
        notes=notes,
        figures=[made for made in drawn if made.series],
        more={"Environment": record["env"]},
    )


def _cells(model: Record, point: Record) -> dict[str, str]:
    """A row by its headers; a point that did not run has what is the model's alone."""
    quality = model["quality"] or {}
    found = {
        "model": model["label"],
        "engine": engine(model["engine"]),
        "size": megabytes(model["size"]["weight_bytes"]),
        "bits": bits(model["size"]["bits_per_weight"]),
        "KL div.": number(quality.get("kld")),
        "ppl": bits(quality.get("perplexity")),
    }
    if point["error"]:
        return found
    decode, prefill, latency = point["decode"]["tokens_per_second"], point["prefill"], point["latency"]
    ratio, memory = point["ratio"]["decode"], point["memory"]
    found |= {
        "decode/s": figure(decode["median"]),
        "±": f"{100 * decode['mad']:.0f} %",
        "prefill/s": figure(prefill["tokens_per_second"]["median"]),
        "first ms": milliseconds(prefill["seconds"]["median"]),
    }
    found |= {"ratio": f"{ratio['value']:.2f}×"} if ratio else {}
    if latency:
        found |= {"token ms": milliseconds(latency["median"]), "p90": milliseconds(latency["p90"])}
    stored = {"weights": "weight_bytes", "KV": "kv_bytes", "peak": "peak_bytes"}
    return found | {key: size(memory[name]) for key, name in stored.items() if memory[name] is not None}


def milliseconds(seconds: float) -> str:
    """Three digits."""
    return figure(1000 * seconds)


def engine(told: Record) -> str:
    """`llama.cpp`, `transformers`, `bitsandbytes`, `decoded`."""
    if told["name"] != "transformers":
        return told["name"]
    if told["packed"]:
        return told["kernels"].partition(" ")[0]
    return "decoded" if told["note"] else told["name"]


def called(point: Record) -> str:
    """`4 × 128 tokens`."""
    return f"{point['batch']} × {point['prompt']} tokens"


# ---- lines below the table


def protocol(record: Record) -> Iterator[str]:
    """Under what the figures hold, and what to know of each model: the foot of the table."""
    asked, models = record["settings"], record["models"]
    runs = count(asked["rounds"], "round") + f" of {count(asked['repeats'], 'run')}"
    yield (
        f"prompts of random tokens (seed {asked['seed']}), {asked['tokens']} new tokens each, greedy, end of "
        f"text ignored; {runs} after {asked['warmup']} to warm up, models in turn, "
        f"{count(asked['threads'], 'thread')}; medians, ± is the median deviation"
    )
    peaks: dict[str, list[str]] = {}  # what a peak is of may differ from model to model
    for model in models:
        if model["load"]:
            yield f"{model['label']}: {_runs_by(model)}"
            peaks.setdefault(model["load"]["memory"], []).append(model["label"])
    for how, labels in peaks.items():
        yield f"peak{f' of {name_all(labels)}' if len(peaks) > 1 else ''}: {how}, the most in any run"
    if told := record["quality"]:
        yield (
            f"KL divergence and perplexity: {told['text']}, {told['tokens']} tokens, context {told['ctx']}, "
            f"against {told['reference']}"
        )
    yield from (note for model in models if (note := model["quality_note"]))


def _runs_by(model: Record) -> str:
    engine = model["engine"]
    how = f"{engine['name']} {engine['version']}, {engine['kernels']}, "
    how += "packed" if engine["packed"] else "decoded" if engine["note"] else "dense"
    how += f", {engine['dtype']}" + (f", {engine['attention']} attention" if engine["attention"] else "")
    loaded = f", loaded in {model['load']['seconds']:.1f} s"
    return how + loaded + (f" ({engine['note']})" if engine["note"] else "")


def noise(record: Record) -> list[str]:
    """Models whose runs differ so much that small differences say nothing, in one line."""
    found = []
    for model in record["models"]:
        ran = [point["decode"]["tokens_per_second"] for point in model["points"] if point["decode"]]
        worst = max((told["mad"] for told in ran), default=0)
        if worst > NOISY:
            found.append(f"{model['label']} (± {100 * worst:.0f} %)")
    return [f"runs of {name_all(found)} differ: stop other programs, or add --repeats"] if found else []


def failures(record: Record) -> list[str]:
    """Why what did not run did not, each reason once for the models and points that it stopped."""
    found: dict[tuple[str, str], list[str]] = {}
    for model in record["models"]:
        for point in model["points"]:
            if point["error"]:
                found.setdefault((model["label"], point["error"]), []).append(called(point))
    every = len(record["models"][0]["points"]) if record["models"] else 0
    return [
        f"{label}{'' if len(where) == every else ', ' + ', '.join(where)}: {why}"
        for (label, why), where in found.items()
    ]


def best_batches(record: Record) -> Iterator[str]:
    """b* of each model and prompt length: what the machine would allow, and what was measured."""
    for model in record["models"]:
        for row in model["roofline"]:
            predicted, fitted = row["predicted"], row["measured"]
            if not fitted and not (predicted and len(record["settings"]["batches"]) > 1):
                continue
            said = f"b* of {model['label']}, {row['prompt']} tokens:"
            if predicted:
                rates = f"{predicted['bandwidth'] / 1e9:,.1f} GB/s, {predicted['flops'] / 1e9:,.0f} GFLOPS"
                said += f" predicted {figure(predicted['optimal_batch'])} ({rates} {predicted['source']}),"
            yield f"{said} measured {_measured(fitted)}"


def _measured(fitted: Record | None) -> str:
    if fitted is None:
        return "not known (it takes three batches, and that more sequences cost time)"
    shape = {"max": "max({}, {}·b)", "sum": "{} + {}·b"}[fitted["shape"]]
    times = shape.format(f"{milliseconds(fitted['floor'])} ms", f"{milliseconds(fitted['slope'])} ms")
    outside = "" if fitted["where"] == "within" else f"{fitted['where']} all batches, about "
    best = outside + figure(fitted["optimal_batch"])
    return f"{best} (a step takes {times}, within {100 * fitted['error']:.0f} %)"


# ---- plots


def _ran(model: Record, **at: int) -> Iterator[Record]:
    """Points with these settings that ran."""
    for point in model["points"]:
        if point["error"] is None and all(point[key] == value for key, value in at.items()):
            yield point


def _speed(model: Record, point: Record, x: float) -> Point:
    told = point["decode"]["tokens_per_second"]
    spread = f"{figure(told['min'])} to {figure(told['max'])}"
    note = f"{model['label']}, {called(point)}: {figure(told['median'])} tokens/s ({spread})"
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
        if predicted := found["predicted"]:
            keys = ("weight_bytes", "cache_bytes", "active", "bandwidth", "flops")
            roof = Roof(**{key: predicted[key] for key in keys})
            xs = np.geomspace(batches[0], batches[-1], STEPS).tolist()
            curve = tuple(Point(x, x / roof.seconds(x)) for x in xs)
            series.append(Series(model["label"], curve, index, joined=True, bare=True))
        for name in ("measured", "predicted") if len(record["models"]) == 1 else ():
            best = found[name]["optimal_batch"] if found[name] else 0
            if batches[0] <= best <= batches[-1]:
                lines.append(Line(f"{name} b* {figure(best)}", "x", best))
    return Figure(
        key=f"batch-{prompt}",
        title=f"Throughput by batch, {prompt} prompt tokens",
        caption="Bars: least and most of all runs. Dashed: the roofline of each, what reading the weights "
        "and the cache once a step and multiplying by them allow.",
        x=Axis("sequences at once", "whole", log=True, ticks=tuple(batches)),
        y=Axis(DECODE, log=True),
        series=tuple(series),
        lines=tuple(lines),
    )


def against(record: Record) -> Figure:
    """Speed against KL divergence where that is known, else against size."""
    known = [model for model in record["models"] if model["quality"] and model["quality"]["kld"]]
    first = record["models"][0]["points"][0]
    series, lines = [], []
    for index, model in enumerate(record["models"]):
        for point in _ran(model, batch=first["batch"], prompt=first["prompt"]):
            made = _speed(model, point, model["size"]["weight_bytes"])
            if model in known:
                loss = model["quality"]["kld"]
                note = f"{made.note}, KL divergence {number(loss)}, {megabytes(made.x)}"
                made = Point(made.y, loss, note=note)
            elif known:
                lines += [Line(f"{model['label']}, {figure(made.y)}/s", "x", made.y)] if index == 0 else []
                continue
            series.append(Series(model["label"], (made,), index, joined=False))
    what = f"Batch {first['batch']}, {first['prompt']} prompt tokens."
    speed = Axis(DECODE, log=True)
    return Figure(
        key="quality" if known else "size",
        title="Quality against speed" if known else "Speed against size",
        caption=f"{what} To the right is faster, below is nearer to the original."
        if known
        else f"{what} Bars: least and most of all runs.",
        x=speed if known else Axis("size of all tensors", "bytes"),
        y=Axis("KL divergence, nats per token", log=True) if known else speed,
        series=tuple(series),
        lines=tuple(lines),
    )


def by_prompt(record: Record) -> Figure:
    """Time to the first token over prompt length, at the smallest batch."""
    batch = record["settings"]["batches"][0]
    series = []
    for index, model in enumerate(record["models"]):
        points = []
        for point in _ran(model, batch=batch):
            told = {key: 1000 * value for key, value in point["prefill"]["seconds"].items()}
            note = f"{model['label']}, {point['prompt']} tokens: {figure(told['median'])} ms"
            points.append(Point(point["prompt"], told["median"], told["min"], told["max"], note))
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
