"""The versioned JSON of a benchmark: `quantkit.bench/1`, described in bench-1.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

SCHEMA = "quantkit.bench/1"
ENGINE = ("version", "kernels", "packed", "dtype", "attention", "weight_bytes")
FIGURES = ("prefill", "decode", "latency", "memory", "ratio")
Run = dict[str, Any]
Rounds = Sequence[Sequence[Run]]


def record(rows: Sequence[Measured], settings: Settings, evaluated: dict | None = None) -> dict[str, Any]:
    """All that was measured; ratios are to the first row. evaluated: what `read_quality` says."""
    asked = asdict(settings)
    del asked["trust_remote_code"]  # it changes no figure
    named = zip(rows, names(rows), strict=True)
    return {
        "schema": SCHEMA,
        "settings": asked,
        "models": [_model(row, rows[0], label, settings, evaluated) for row, label in named],
        "quality": evaluated
        and {key: evaluated["data"][key] for key in ("text", "sha256", "tokens", "ctx")}
        | {"reference": evaluated["models"][0]["source"]},
        "env": environment(settings.device),
    }


def _model(
    row: Measured, first: Measured, label: str, settings: Settings, evaluated: dict | None
) -> dict[str, Any]:
    quality, quality_note = match(row.subject, evaluated)
    loaded = row.loaded or {}
    return {
        "source": row.subject.source,
        "label": label,
        "size": {
            "disk_bytes": row.subject.disk_bytes,
            "weight_bytes": row.subject.weight_bytes,
            "bits_per_weight": row.subject.bits_per_weight,
        },
        "quality": quality,
        "quality_note": quality_note,
        "engine": {
            "name": row.engine,
            **{key: loaded.get(key) for key in ENGINE},
            "note": "; ".join(filter(None, (row.note, loaded.get("note")))),
        },
        "load": row.loaded
        and {
            "seconds": median(row.load_seconds),
            "peak_bytes": loaded["peak_bytes"],
            "memory": loaded["how"],
        },
        "error": row.error,
        "points": [_point(row, first, point, settings) for point in settings.points],
        "roofline": [_roofline(row, prompt, settings) for prompt in settings.prompts],
    }


def names(rows: Sequence[Measured]) -> list[str]:
    """The shortest ends of the sources that tell them apart, with the engine where one model has several; a
    row that is there again is numbered."""
    sources = list(dict.fromkeys(row.subject.source for row in rows))
    short = dict(zip(sources, labels(sources), strict=True))
    made: list[str] = []
    for row in rows:
        engines = {other.engine for other in rows if other.subject.source == row.subject.source}
        made.append(short[row.subject.source] + (f" ({row.engine})" if len(engines) > 1 else ""))
    again = [made[:position].count(name) for position, name in enumerate(made)]
    return [f"{name} #{count + 1}" if count else name for name, count in zip(made, again, strict=True)]


# ---- figures of runs


def prefill(run: Run) -> float:
    """Tokens a second."""
    return run["prefill_tokens"] / run["prefill_seconds"]


def decode(run: Run) -> float:
    """Tokens a second, of all sequences together."""
    return run["decode_tokens"] / run["decode_seconds"]


def median(values: Any) -> float:
    """numpy's, as JSON takes it."""
    return float(np.median(values))


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """count, median, p90, min, max; mad: the median distance from the median, as a share of it.

    Median and MAD forget a run that another program disturbed, where mean and standard deviation would not.
    """
    middle, p90 = np.quantile(values, (0.5, 0.9)).tolist()
    scatter = median(np.abs(np.subtract(values, middle)))
    return {
        "count": len(values),
        "median": middle,
        "p90": p90,
        "min": min(values),
        "max": max(values),
        "mad": scatter / middle if middle else 0.0,
    }


def _point(row: Measured, first: Measured, point: Point, settings: Settings) -> dict[str, Any]:
    """One point's figures; `error` says why there are none."""
    rounds, others = _rounds(row, point), _rounds(first, point)
    made: dict[str, Any] = asdict(point) | {"tokens": settings.tokens, "error": None}
    if not rounds:
        why = row.refused.get(point) or row.error or "it was not reached"
        return made | {"error": why} | dict.fromkeys(FIGURES)
    runs = sum(rounds, [])
    steps = [step for run in runs for step in run["step_seconds"]]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    seconds = summary([run["prefill_seconds"] for run in runs])
    return made | {
        "prefill": _speed(rounds, prefill, runs[0]["prefill_tokens"]) | {"seconds": seconds},
        "decode": _speed(rounds, decode, runs[0]["decode_tokens"]),
        "latency": summary(steps) if steps else None,
        "memory": {
            "weight_bytes": row.loaded["weight_bytes"],
            "kv_bytes": runs[0]["kv_bytes"],
            "peak_bytes": max(peaks, default=None),
        },
        "ratio": {"prefill": _ratio(rounds, others, prefill), "decode": _ratio(rounds, others, decode)},
    }


def _rounds(row: Measured, point: Point) -> list[list[Run]]:
    return [runs for runs in row.runs.get(point, ()) if runs]


def _speed(rounds: Rounds, speed: Callable[[Run], float], tokens: int) -> dict[str, Any]:
    speeds = [[speed(run) for run in runs] for runs in rounds]
    return {
        "tokens": tokens,
        "tokens_per_second": summary(sum(speeds, [])),
        "rounds": [median(found) for found in speeds],
    }


def _ratio(own: Rounds, other: Rounds, speed: Callable[[Run], float]) -> dict[str, float] | None:
    """To the first model: of the medians, and least and most of the rounds'; None where that did not run."""
    if not other:
        return None
    mine, theirs = (_speed(rounds, speed, 0) for rounds in (own, other))
    pairs = [a / b for a, b in zip(mine["rounds"], theirs["rounds"], strict=False)]
    value = mine["tokens_per_second"]["median"] / theirs["tokens_per_second"]["median"]
    return {"value": value, "min": min(pairs), "max": max(pairs)}


def _roofline(row: Measured, prompt: int, settings: Settings) -> dict[str, Any]:
    """What the machine allows for prompts of a length, and what was measured: b* of both."""
    points = [Point(batch, prompt) for batch in settings.batches]
    ran = {point.batch: sum(rounds, []) for point in points if (rounds := _rounds(row, point))}
    times = [(batch, batch / median([decode(run) for run in runs])) for batch, runs in ran.items()]
    made: dict[str, Any] = {"prompt": prompt, "predicted": None, "measured": None}
    if fitted := roofline.fit(times):
        best = {"optimal_batch": fitted.optimal_batch, "where": roofline.where(fitted, times)}
        made["measured"] = asdict(fitted) | best
    if ran and row.rates:
        batch, runs = next(iter(ran.items()))
        roof = roofline.Roof(
            weight_bytes=row.loaded["weight_bytes"] * row.subject.read_share,
            cache_bytes=(runs[0]["kv_bytes"] or 0) / batch,
            active=row.subject.active,
            bandwidth=row.rates["bandwidth"],
            flops=row.rates["flops"],
        )
        best = {"optimal_batch": roof.optimal_batch, "source": row.rates["source"]}
        made["predicted"] = asdict(roof) | best
    return made


# ---- quality


def read_quality(paths: Sequence[Path]) -> dict[str, Any] | None:
    """One record of all files of `quantkit eval --json`; None without files. Raises QuantkitError as
    `quantkit report` does."""
    return merge.merge([merge.read(path) for path in paths]) if paths else None


def match(subject: Subject, evaluated: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The evaluation's model with the subject's source, else the only one of its name; and why there is none.

    One of another size is another model, whatever it is called.
    """
    if evaluated is None:
        return None, ""
    models, name = evaluated["models"], _name(subject.source)
    same = [model for model in models if model["source"] == subject.source]
    named = same or [model for model in models if _name(model["source"]) == name]
    if not named:
        return None, f"{subject.source} is not among the models of --quality"
    if len(named) > 1:
        return None, f"several models of --quality are called {name}"
    (found,) = named
    if found["size"]["weight_bytes"] != subject.weight_bytes:
        sizes = f"{found['size']['weight_bytes']:,} bytes there, {subject.weight_bytes:,} here"
        return None, f"{subject.source} is another model in --quality: {sizes}"
    metrics = found["metrics"]
    kld = 0.0 if found is models[0] else (metrics.get("kld") or {}).get("mean")
    return {"kld": kld, "perplexity": metrics["ppl"]["value"]}, ""


def _name(source: str) -> str:
    """The last part of a path or hub id."""
    return source.rstrip("/").rpartition("/")[2]
