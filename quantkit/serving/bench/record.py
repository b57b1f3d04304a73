"""The versioned JSON of a benchmark: `quantkit.bench/3`, described in bench-3.json."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.evaluation.comparison.columns import labels
from quantkit.evaluation.comparison.record import environment
from quantkit.serving.bench.measure import ModelRuns, Subject
from quantkit.serving.bench.settings import BenchSettings, Workload

SCHEMA = "quantkit.bench/3"
ENGINE = ("version", "kernels", "packed", "dtype", "attention", "weight_bytes")
FIGURES = ("prefill", "first_token", "decode", "latency", "ratio", "kv_bytes", "peak_bytes")
FEWEST_BATCHES = 3  # batch sizes that a fit needs
Run = dict[str, Any]


def record(
    models: Sequence[ModelRuns], settings: BenchSettings, evaluated: dict | None = None
) -> dict[str, Any]:
    """Return the JSON of all models; ratios are to the first. evaluated: record of `quantkit eval`."""
    labelled = zip(models, unique_labels(models), strict=True)
    return {
        "schema": SCHEMA,
        "settings": settings.record(),
        "models": [_model(model, models[0], label, settings, evaluated) for model, label in labelled],
        "quality": evaluated
        and {key: evaluated["data"][key] for key in ("text", "sha256", "tokens", "ctx")}
        | {"reference": evaluated["models"][0]["source"]},
        "env": environment(settings.device),
    }


def _model(
    model: ModelRuns, first: ModelRuns, label: str, settings: BenchSettings, evaluated: dict | None
) -> dict[str, Any]:
    loaded, load = model.loaded[-1] if model.loaded else {}, None
    facts = {key: loaded.get(key) for key in ENGINE}
    notes = filter(None, (model.note, loaded.get("note")))
    if loaded:
        seconds = float(np.median([event["seconds"] for event in model.loaded]))
        load = {"seconds": seconds, "peak_bytes": loaded["peak_bytes"], "memory": loaded["how"]}
    return {
        "source": model.subject.source,
        "label": label,
        "size": model.subject.size,
        "quality": match(model.subject, evaluated),
        "engine": {"name": model.engine, **facts, "note": "; ".join(notes)},
        "load": load,
        "error": model.error,
        "points": [_point(model, first, work) for work in settings.workloads],
        "fits": _fits(model, settings),
    }


def unique_labels(models: Sequence[ModelRuns]) -> list[str]:
    """Return a unique label per model: the end of its source, with the engine if there are several, and a
    number if it is the same as before."""
    sources = list(dict.fromkeys(model.subject.source for model in models))
    short = dict(zip(sources, labels(sources), strict=True))
    engines = {source: {m.engine for m in models if m.subject.source == source} for source in sources}
    named = [
        short[model.subject.source] + (f" ({model.engine})" if len(engines[model.subject.source]) > 1 else "")
        for model in models
    ]
    earlier = [named[:k].count(name) for k, name in enumerate(named)]
    return [name + (f" #{times + 1}" if times else "") for name, times in zip(named, earlier, strict=True)]


# ---- figures of runs


def decode_rate(runs: Sequence[Run]) -> dict[str, float]:
    """Return the summary of new tokens a second, of all sequences together."""
    return summary([run["decode_tokens"] / run["decode_seconds"] for run in runs])


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, p90, min, max and mad: the median absolute deviation divided by the median.

    Median and MAD, unlike mean and standard deviation, ignore a run that another program disturbed.
    """
    middle, p90 = np.quantile(values, (0.5, 0.9)).tolist()
    scatter = float(np.median(np.abs(np.subtract(values, middle))))
    mad = scatter / middle if middle else 0.0
    return {"median": middle, "p90": p90, "min": min(values), "max": max(values), "mad": mad}


def _point(model: ModelRuns, first: ModelRuns, work: Workload) -> dict[str, Any]:
    """Return the figures of one workload; `error` says why there are none."""
    runs, first_runs = model.runs.get(work), first.runs.get(work)
    if not runs:
        why = model.refused.get(work) or model.error or "not reached"
        return asdict(work) | {"error": why} | dict.fromkeys(FIGURES)
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    prompt_tokens, speed = work.batch * work.prompt, decode_rate(runs)
    return asdict(work) | {
        "error": None,
        "prefill": summary([prompt_tokens / run["prefill_seconds"] for run in runs]),
        "first_token": summary([run["prefill_seconds"] for run in runs]),
        "decode": speed,
        "latency": summary([step for run in runs for step in run["step_seconds"]]),
        "ratio": speed["median"] / decode_rate(first_runs)["median"] if first_runs else None,
        "kv_bytes": runs[0]["kv_bytes"],
        "peak_bytes": max(peaks, default=None),
    }


def _fits(model: ModelRuns, settings: BenchSettings) -> list[dict[str, float]]:
    """Return `fit` for each prompt length that has one."""
    fits = []
    for prompt in settings.numbers("prompt_tokens"):
        loads = [(batch, model.runs.get(Workload(batch, prompt))) for batch in settings.numbers("batch")]
        fitted = fit([(batch, batch / decode_rate(runs)["median"]) for batch, runs in loads if runs])
        fits += [{"prompt": prompt} | fitted] if fitted else []
    return fits


def fit(times: Sequence[tuple[int, float]]) -> dict[str, float] | None:
    """Fit times, given as (batch, seconds of a step), by floor + slope · batch. The fit minimizes relative
    errors, since times span decades. At optimal_batch = floor / slope, a step takes twice its fixed time.

    Returns None for fewer than FEWEST_BATCHES batch sizes, or if floor or slope is not positive.
    """
    if len({batch for batch, _ in times}) < FEWEST_BATCHES:
        return None
    batches, seconds = np.asarray(times, dtype=float).T
    slope, floor = np.polyfit(batches, seconds, 1, w=1 / seconds).tolist()
    if slope <= 0 or floor <= 0:
        return None
    return {"floor": floor, "slope": slope, "optimal_batch": floor / slope}


# ---- quality


def match(subject: Subject, evaluated: dict[str, Any] | None) -> dict[str, float] | None:
    """Return KL divergence and perplexity of the evaluated model that is the subject; None if there is none.
    Its weights take as many bytes, and its source is the same, or has at least the same name."""
    models = evaluated["models"] if evaluated else []
    name = Path(subject.source).name
    alike = [
        model
        for model in models
        if model["size"]["weight_bytes"] == subject.size["weight_bytes"]
        and Path(model["source"]).name == name
    ]
    if not alike:
        return None
    model = next((model for model in alike if model["source"] == subject.source), alike[0])
    metrics = model["metrics"]
    kld = 0.0 if model is models[0] else (metrics.get("kld") or {}).get("mean")
    return {"kld": kld, "perplexity": metrics["ppl"]["value"]}
