"""The versioned JSON of a comparison, `quantkit.eval/3`, described in eval-3.json: written, read and merged.

Records of different protocols are not merged.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import __version__
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, refuse_problems, require, unreadable
from quantkit.evaluation.comparison.gates import Gate, judge, look_up
from quantkit.models.files import untrusted

if TYPE_CHECKING:
    from quantkit.evaluation.windows import Protocol

SCHEMA = "quantkit.eval/3"
MAKE = "quantkit eval … --json > FILE makes one"
Named = tuple[str, dict]  # file, record
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


def refuse_declined(record: dict) -> None:
    """Raise QuantkitError, with the record, if the engine did not run a candidate. An original that it does
    not load, such as a folder in llama.cpp, is no error."""
    errors = not_run(record)
    for first in errors[:1]:
        messages = [error["message"] for error in errors]
        refuse_problems(record, messages, first["exit_code"], first["hint"])


def not_run(record: dict) -> list[dict]:
    """Return the errors of candidates that the engine did not run."""
    original, errors = record["models"][0]["source"], record.get("engine_declined") or {}
    return [error for source, error in errors.items() if source != original]


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

    The loss is the KL divergence (0 for the base), or the perplexity if a candidate's was not measured.
    """
    candidates = [model for model in _served(models)[1:] if not model.get("engine")]
    diverging = candidates and all("kld" in model["metrics"] for model in candidates)
    loss = LOSSES[0] if diverging else LOSSES[1]
    points = []
    for position, model in enumerate(model for model in _served(models) if not model.get("engine")):
        value = 0.0 if position == 0 and loss == LOSSES[0] else look_up(model, loss)
        if value is not None:
            points.append((model["size"]["weight_bytes"], value, model["source"]))
    best = [
        (nbytes, value, source)
        for nbytes, value, source in points
        if not any((a, b) != (nbytes, value) and a <= nbytes and b <= value for a, b, _ in points)
    ]
    return {"size": "size.weight_bytes", "loss": loss, "models": [source for _, _, source in sorted(best)]}


def _served(models: Sequence[dict]) -> list[dict]:
    return [model for model in models if not model.get("weights_only")]


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- records read back


def read(path: Path) -> Named:
    """Read a file written by `quantkit eval --json`; return (path, record). Raises QuantkitError."""
    try:
        record = untrusted.parse(untrusted.read(path))
        json.dumps(record, allow_nan=False)  # refuses NaN, Infinity and 1e400
    except OSError as error:
        raise unreadable(path, error, MAKE) from error
    except ValueError as error:
        raise _no_result(path, f"not JSON: {error}") from error
    schema = record.get("schema") if isinstance(record, dict) else None
    require(str(schema).startswith("quantkit.eval/"), f"{path} is not a result of quantkit eval", MAKE, USAGE)
    what = f"{path} is {schema}, this quantkit reads {SCHEMA}"
    require(schema == SCHEMA, what, "evaluate again with this version", UNSUPPORTED)
    if fault := _fault(record):
        raise _no_result(path, fault)
    return str(path), record


def _fault(record: Any) -> str | None:
    """Return a record's first violation of the schema or of limits on numbers and names, or None."""
    import jsonschema

    schema = json.loads(Path(__file__).with_name("eval-3.json").read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(record))
    return f"{error.json_path[:120]}: {error.message[:120]}" if error else None


def _no_result(path: Path, why: str) -> QuantkitError:
    return QuantkitError(f"{path} is not a result of quantkit eval ({why})", MAKE, USAGE)


def merge(results: Sequence[Named]) -> dict:
    """Merge records into one with all candidates and a common Pareto front. Of several results for one model,
    the first counts.

    Raises QuantkitError unless protocol, tasks and first model are the same in all files.
    """
    (name, first), *others = results
    models, gates, declined = list(first["models"]), list(first["gates"]), {}
    for other_name, other in others:
        ours, theirs = _conditions(first), _conditions(other)
        differ = [key for key in ours if ours[key] != theirs[key]]
        if "sha256" in differ:  # of another text, the loss differs too
            ours, theirs, differ = first["data"], other["data"], ["text", *differ]
            differ = [key for key in differ if key in ours and ours[key] != theirs[key]]
        differ = [key for key in differ if key != "nll"] or differ  # a consequence of the others
        odd = [f"{key} {_short(ours[key])} and {_short(theirs[key])}" for key in differ]
        what = f"{name} and {other_name} were measured differently: {', '.join(odd)}"
        hint = "such figures cannot be compared: evaluate again, or make two reports"
        require(not odd, what, hint, UNSUPPORTED)
        shown = {model["source"]: model for model in models}
        models += [model for model in other["models"][1:] if model["source"] not in shown]
        same = {model["source"] for model in other["models"] if shown.get(model["source"], model) == model}
        gates += [gate for gate in other["gates"] if gate["model"] in same and gate not in gates]
    for _, result in reversed(results):
        declined |= result.get("engine_declined") or {}
    floor = next((result["noise_floor"] for _, result in results if result["noise_floor"]), None)
    merged = first | {"models": models, "pareto": pareto(models), "gates": gates, "noise_floor": floor}
    merged |= {"engine_declined": declined} if declined else {}
    merged.pop("error", None)  # failed gates are listed in `gates`
    return merged


def _conditions(record: dict) -> dict[str, Any]:
    """Return the conditions that must be equal in all files; names of text and first model may differ."""
    base = record["models"][0]
    loss = base["metrics"]["nll"]["value"]  # machines sum in different orders
    more = {"bytes": base["size"]["weight_bytes"], "nll": loss and round(loss, 3), "tasks": record["tasks"]}
    return {key: value for key, value in record["data"].items() if key != "text"} | more


def _short(value: Any) -> str:
    """Return a value of the protocol as text, hashes shortened."""
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"
