"""Reads, checks and merges result files. Figures of different protocols are not merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require, unreadable
from quantkit.evaluation.comparison.record import SCHEMA, pareto
from quantkit.models.files import untrusted

MAKE = "quantkit eval … --json > FILE makes one"
Named = tuple[str, dict]  # file, record


def read(path: Path) -> Named:
    """Read a file written by `quantkit eval --json`; return (path, record). Raises QuantkitError."""
    try:
        text = untrusted.read(path).decode("utf-8")
    except OSError as error:
        raise unreadable(path, error, MAKE) from error
    except UnicodeDecodeError as error:
        raise _no_result(path, f"not UTF-8 text: {error}") from error
    try:
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _no_result(path, f"not JSON: {error}") from error
    schema = record.get("schema") if isinstance(record, dict) else None
    outdated = schema != SCHEMA and str(schema).startswith("quantkit.eval/")
    what = f"{path} is {schema}, this quantkit reads {SCHEMA}"
    require(not outdated, what, "evaluate again with this version", UNSUPPORTED)
    if fault := _fault(record):
        raise _no_result(path, fault)
    return str(path), record


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


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
    models, gates = list(first["models"]), list(first["gates"])
    for other_name, other in others:
        ours, theirs = _conditions(first), _conditions(other)
        odd = [
            f"{key} {_short(ours[key])} and {_short(theirs[key])}" for key in ours if ours[key] != theirs[key]
        ]
        what = f"{name} and {other_name} were measured under different protocols: {', '.join(odd)}"
        hint = "such figures cannot be compared: evaluate again, or make two reports"
        require(not odd, what, hint, UNSUPPORTED)
        sources = {model["source"] for model in models}
        models += [model for model in other["models"][1:] if model["source"] not in sources]
        gates += [gate for gate in other["gates"] if gate not in gates]
    merged = first | {"models": models, "pareto": pareto(models), "gates": gates}
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
