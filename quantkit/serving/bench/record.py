"""The versioned JSON of a benchmark: `quantkit.bench/2`, described in bench-2.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.evaluation.comparison import merge
from quantkit.evaluation.comparison.columns import labels
from quantkit.evaluation.comparison.record import environment
from quantkit.serving.bench import roofline
from quantkit.serving.bench.measure import Measured
from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Subject

SCHEMA = "quantkit.bench/2"
ENGINE = ("version", "kernels", "packed", "dtype", "attention", "weight_bytes")
FIGURES = ("prefill", "first_token", "decode", "latency", "ratio", "kv_bytes", "peak_bytes")
Run = dict[str, Any]


def record(rows: Sequence[Measured], settings: Settings, evaluated: dict | None = None) -> dict[str, Any]:
    """Return the JSON of all rows; ratios are to the first row. evaluated: result of `read_quality`."""
    named = zip(rows, names(rows), strict=True)
    return {
        "schema": SCHEMA,
        "settings": settings.record(),
        "models": [_model(row, rows[0], label, settings, evaluated) for row, label in named],
        "quality": evaluated
        and {key: evaluated["data"][key] for key in ("text", "sha256", "tokens", "ctx")}
        | {"reference": evaluated["models"][0]["source"]},
        "env": environment(settings.device),
    }


def _model(
    row: Measured, first: Measured, label: str, settings: Settings, evaluated: dict | None
) -> dict[str, Any]:
    loaded = row.loaded or {}
    notes = filter(None, (row.note, loaded.get("note")))
    return {
        "source": row.subject.source,
        "label": label,
        "size": {
            "disk_bytes": row.subject.disk_bytes,
            "weight_bytes": row.subject.weight_bytes,
            "bits_per_weight": row.subject.bits_per_weight,
        },
        "quality": match(row.subject, evaluated),
        "engine": {"name": row.engine, **{key: loaded.get(key) for key in ENGINE}, "note": "; ".join(notes)},
        "load": row.loaded
        and {
            "seconds": float(np.median(row.load_seconds)),
            "peak_bytes": loaded["peak_bytes"],
            "memory": loaded["how"],
        },
        "error": row.error,
        "points": [_point(row, first, point) for point in settings.points],
        "roofline": [_roofline(row, prompt, settings) for prompt in settings.numbers("prompt_tokens")],
    }


def names(rows: Sequence[Measured]) -> list[str]:
    """Return a unique label per row: the end of its source, with the engine if there are several."""
    sources = list(dict.fromkeys(row.subject.source for row in rows))
    short = dict(zip(sources, labels(sources), strict=True))
    made = [short[row.subject.source] for row in rows]
    repeated = {name for name in made if made.count(name) > 1}
    return [
        f"{name} ({row.engine})" if name in repeated else name for name, row in zip(made, rows, strict=True)
    ]


# ---- figures of runs


def decode(run: Run) -> float:
    """Return new tokens a second, of all sequences together."""
    return run["decode_tokens"] / run["decode_seconds"]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, p90, min, max and mad: the median absolute deviation divided by the median.

    Median and MAD, unlike mean and standard deviation, ignore a run that another program disturbed.
    """
    middle, p90 = np.quantile(values, (0.5, 0.9)).tolist()
    scatter = float(np.median(np.abs(np.subtract(values, middle))))
    mad = scatter / middle if middle else 0.0
    return {"median": middle, "p90": p90, "min": min(values), "max": max(values), "mad": mad}


def _point(row: Measured, first: Measured, point: Point) -> dict[str, Any]:
    """Return the figures of one point; `error` says why there are none."""
    runs, others = row.runs.get(point), first.runs.get(point)
    made: dict[str, Any] = asdict(point) | {"error": None}
    if not runs:
        why = row.refused.get(point) or row.error or "not reached"
        return made | {"error": why} | dict.fromkeys(FIGURES)
    steps = [step for run in runs for step in run["step_seconds"]]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    speed = summary([decode(run) for run in runs])
    return made | {
        "prefill": summary([run["prefill_tokens"] / run["prefill_seconds"] for run in runs]),
        "first_token": summary([run["prefill_seconds"] for run in runs]),
        "decode": speed,
        "latency": summary(steps),
        "ratio": speed["median"] / summary([decode(run) for run in others])["median"] if others else None,
        "kv_bytes": runs[0]["kv_bytes"],
        "peak_bytes": max(peaks, default=None),
    }


def _roofline(row: Measured, prompt: int, settings: Settings) -> dict[str, Any]:
    """Return b* (see roofline.py), predicted and measured, for prompts of `prompt` tokens."""
    batches = settings.numbers("batch")
    ran = {batch: runs for batch in batches if (runs := row.runs.get(Point(batch, prompt)))}
    times = [(batch, batch / summary([decode(run) for run in runs])["median"]) for batch, runs in ran.items()]
    predicted = None
    if ran and row.rates:
        batch, runs = next(iter(ran.items()))
        roof = roofline.Roof(
            weight_bytes=row.loaded["weight_bytes"] * row.subject.read_share,
            cache_bytes=(runs[0]["kv_bytes"] or 0) / batch,
            active=row.subject.active,
            bandwidth=max(rates["bandwidth"] for rates in row.rates),
            flops=max(rates["flops"] for rates in row.rates),
        )
        predicted = asdict(roof) | {"optimal_batch": roof.optimal_batch}
    return {"prompt": prompt, "predicted": predicted, "measured": roofline.fit(times)}


# ---- quality


def read_quality(paths: Sequence[str]) -> dict[str, Any] | None:
    """Merge results of `quantkit eval --json` into one record; None without files. Raises QuantkitError as
    `quantkit report` does."""
    return merge.merge([merge.read(Path(path)) for path in paths]) if paths else None


def match(subject: Subject, evaluated: dict[str, Any] | None) -> dict[str, float] | None:
    """Return kld and perplexity of the evaluated model that is the subject: of equal size in bytes, and with
    the same source, or the same last part of it. None if there is none."""

    def end(source: str) -> str:
        return source.rstrip("/").rpartition("/")[2]

    models = (evaluated or {}).get("models", [])
    same = [model for model in models if model["size"]["weight_bytes"] == subject.weight_bytes]
    found = [model for model in same if model["source"] == subject.source]
    found = found or [model for model in same if end(model["source"]) == end(subject.source)]
    if not found:
        return None
    metrics = found[0]["metrics"]
    kld = 0.0 if found[0] is models[0] else (metrics.get("kld") or {}).get("mean")
    return {"kld": kld, "perplexity": metrics["ppl"]["value"]}
