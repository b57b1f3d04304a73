"""The versioned JSON of a comparison: `quantkit.eval/3`, described in eval-3.json."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from quantkit import __version__
from quantkit.evaluation.comparison.gates import Gate, judge, look_up

if TYPE_CHECKING:
    from quantkit.evaluation.windows import Protocol

SCHEMA = "quantkit.eval/3"
LOSSES = ("metrics.kld.mean", "metrics.ppl.value")  # loss of the Pareto front: the first that was measured


def record(
    protocol: Protocol, dtype: Any, device: Any, measured: dict, gates: Sequence[Gate] = (),
    tasks: dict | None = None,
) -> dict:  # fmt: skip
    """Return the JSON of what `evaluate` measured, with protocol and environment; NaN and infinity become
    null. tasks: settings of the tasks, if any."""
    measured = _finite(measured)
    return {
        "schema": SCHEMA,
        "data": asdict(protocol) | {"dtype": str(dtype).removeprefix("torch.")},
        **measured,
        "tasks": tasks,
        "pareto": pareto(measured["models"]),
        "gates": judge(gates, _served(measured["models"])),
        "env": environment(str(device)),
    }


def environment(device: str) -> dict:
    """Return versions of libraries and system as JSON, without names of machine or user."""
    return {
        "quantkit": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
    }


def pareto(models: Sequence[dict]) -> dict:
    """Return {loss: path of the metric, models: sources on the Pareto front}. A model is on the front if no
    other is at least as good in size and loss and better in one. Models measured with weights only or in an
    engine are ignored.

    The loss is the KL divergence (0 for the base), or the perplexity if no divergence was measured.
    """
    diverging = any(look_up(model, LOSSES[0]) is not None for model in models)
    loss = LOSSES[0] if diverging else LOSSES[1]
    points = []
    for position, model in enumerate(model for model in _served(models) if not model.get("engine")):
        value = 0.0 if position == 0 and loss == LOSSES[0] else look_up(model, loss)
        if value is not None:
            points.append((model["size"]["weight_bytes"], value, model["source"]))
    best = [point for point in points if not any(_beats(other, point) for other in points)]
    return {"size": "size.weight_bytes", "loss": loss, "models": [source for _, _, source in sorted(best)]}


def _served(models: Sequence[dict]) -> list[dict]:
    return [model for model in models if not model.get("weights_only")]


def _beats(point: tuple, other: tuple) -> bool:
    return point[:2] != other[:2] and point[0] <= other[0] and point[1] <= other[1]


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
