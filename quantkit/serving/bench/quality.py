"""KL divergence and perplexity that `quantkit eval --json` measured of the same checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.evaluation.comparison import merge
from quantkit.serving.bench.subjects import Subject


def read(paths: Sequence[Path]) -> dict[str, Any] | None:
    """One record of all files; None without files. Raises QuantkitError as `quantkit report` does."""
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
