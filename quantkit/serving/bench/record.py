"""The versioned JSON of a benchmark: `quantkit.bench/1`, described in bench-1.json."""

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

SCHEMA = "quantkit.bench/1"
UNTOLD = ("trust_remote_code",)  # settings that change no figure
Run = dict[str, Any]


def record(rows: Sequence[Measured], settings: Settings, evaluated: dict | None = None) -> dict[str, Any]:
    """All that was measured. evaluated: what `read_quality` says."""
    told = asdict(settings)
    return {
        "schema": SCHEMA,
        "settings": {key: value for key, value in told.items() if key not in UNTOLD},
        "models": models(rows, settings, evaluated),
        "quality": evaluated
        and {key: evaluated["data"][key] for key in ("text", "sha256", "tokens", "ctx")}
        | {"reference": evaluated["models"][0]["source"]},
        "env": environment(settings.device),
    }


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


def median(values: Any) -> float:
    """numpy's, as JSON takes it."""
    return float(np.median(values))


def models(rows: Sequence[Measured], settings: Settings, evaluated: dict | None) -> list[dict[str, Any]]:
    """A record of each row; ratios are to the first one."""
    found = []
    named = names(rows)
    for row, label in zip(rows, named, strict=True):
        quality, quality_note = match(row.subject, evaluated)
        found.append(
            {
                "source": row.subject.source,
                "label": label,
                "size": {
                    "disk_bytes": row.subject.disk_bytes,
                    "weight_bytes": row.subject.weight_bytes,
                    "bits_per_weight": row.subject.bits_per_weight,
                },
                "quality": quality,
                "quality_note": quality_note,
                "engine": _engine(row),
                "load": row.loaded
                and {
                    "seconds": median(row.load_seconds),
                    "peak_bytes": row.loaded["peak_bytes"],
                    "memory": row.loaded["how"],
                },
                "error": row.error,
                "points": [_point(row, rows[0], point, settings) for point in settings.points],
                "roofline": [_roofline(row, prompt, settings) for prompt in settings.prompts],
            }
        )
    return found


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


def _engine(row: Measured) -> dict[str, Any]:
    keys = ("version", "kernels", "packed", "dtype", "attention", "weight_bytes")
    told = row.loaded or dict.fromkeys(keys)
    note = "; ".join(filter(None, (row.note, told.get("note"))))
    return {"name": row.engine, **{key: told[key] for key in keys}, "note": note}


def _point(row: Measured, first: Measured, point: Point, settings: Settings) -> dict[str, Any]:
    """One point's figures; `error` says why there are none."""
    rounds = [runs for runs in row.runs.get(point, []) if runs]
    runs = [run for runs in rounds for run in runs]
    why = None if runs else row.refused.get(point) or row.error or "it was not reached"
    made: dict[str, Any] = asdict(point) | {"tokens": settings.tokens, "error": why}
    if not runs:
        return made | dict.fromkeys(("prefill", "decode", "latency", "memory", "ratio"))
    steps = [step for run in runs for step in run["step_seconds"]]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return made | {
        "prefill": _speed(rounds, prefill, runs[0]["prefill_tokens"])
        | {"seconds": summary([run["prefill_seconds"] for run in runs])},
        "decode": _speed(rounds, decode, runs[0]["decode_tokens"]),
        "latency": summary(steps) if steps else None,
        "memory": {
            "weight_bytes": row.loaded["weight_bytes"],
            "kv_bytes": runs[0]["kv_bytes"],
            "peak_bytes": max(peaks, default=None),
        },
        "ratio": {
            name: _ratio(row, first, point, speed)
            for name, speed in (("prefill", prefill), ("decode", decode))
        },
    }


def prefill(run: Run) -> float:
    """Tokens a second."""
    return run["prefill_tokens"] / run["prefill_seconds"]


def decode(run: Run) -> float:
    """Tokens a second, of all sequences together."""
    return run["decode_tokens"] / run["decode_seconds"]


def _speed(rounds: Sequence[Sequence[Run]], speed: Any, tokens: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "tokens_per_second": summary([speed(run) for runs in rounds for run in runs]),
        "rounds": [median([speed(run) for run in runs]) for runs in rounds],
    }


def _ratio(row: Measured, first: Measured, point: Point, speed: Any) -> dict[str, float] | None:
    """To the first model: of the medians, and least and most of the rounds'; None where that did not run."""
    own, other = row.runs.get(point), first.runs.get(point)
    if not own or not other:
        return None
    medians = [[median([speed(run) for run in runs]) for runs in rounds if runs] for rounds in (own, other)]
    overall = [median([speed(run) for runs in rounds for run in runs]) for rounds in (own, other)]
    pairs = [mine / theirs for mine, theirs in zip(*medians, strict=False)]
    return {"value": overall[0] / overall[1], "min": min(pairs), "max": max(pairs)}


def _roofline(row: Measured, prompt: int, settings: Settings) -> dict[str, Any]:
    """What the machine allows for prompts of a length, and what was measured: b* of both."""
    points = [Point(batch, prompt) for batch in settings.batches]
    ran = {point: [run for runs in row.runs.get(point, ()) for run in runs] for point in points}
    times = [
        (point.batch, point.batch / median([decode(run) for run in runs]))
        for point, runs in ran.items()
        if runs
    ]
    made: dict[str, Any] = {"prompt": prompt, "predicted": None, "measured": None}
    fitted = roofline.fit(times)
    if fitted:
        made["measured"] = asdict(fitted) | {
            "optimal_batch": fitted.optimal_batch,
            "where": roofline.where(fitted, times),
        }
    roof = (
        times and row.rates and roof_of(row, next(run for runs in ran.values() for run in runs), times[0][0])
    )
    if roof:
        made["predicted"] = asdict(roof) | {
            "optimal_batch": roof.optimal_batch,
            "source": row.rates["source"],
        }
    return made


def roof_of(row: Measured, run: Run, batch: int) -> roofline.Roof:
    """From the weights as they lie in memory, and the cache of a run of so many sequences."""
    return roofline.Roof(
        weight_bytes=row.loaded["weight_bytes"] * row.subject.read_share,
        cache_bytes=(run["kv_bytes"] or 0) / batch,
        active=row.subject.active,
        bandwidth=row.rates["bandwidth"],
        flops=row.rates["flops"],
    )


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
    models = evaluated["models"]
    same = [model for model in models if model["source"] == subject.source]
    named = same or [model for model in models if _name(model["source"]) == _name(subject.source)]
    if not named:
        return None, f"{subject.source} is not among the models of --quality"
    if len(named) > 1:
        return None, f"several models of --quality are called {_name(subject.source)}"
    (found,) = named
    if found["size"]["weight_bytes"] != subject.weight_bytes:
        sizes = f"{found['size']['weight_bytes']:,} bytes there, {subject.weight_bytes:,} here"
        return None, f"{subject.source} is another model in --quality: {sizes}"
    first = found is models[0]
    metrics = found["metrics"]
    return {
        "kld": 0.0 if first else (metrics.get("kld") or {}).get("mean"),
        "perplexity": metrics["ppl"]["value"],
    }, ""


def _name(source: str) -> str:
    """The last part of a path or hub id."""
    return source.rstrip("/").rpartition("/")[2]
