"""Result files read back, checked, and put together: only what was measured alike shares a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, QuantkitError
from quantkit.evaluation.comparison.record import SCHEMA, pareto
from quantkit.models.files import untrusted

SAME_NLL = 1e-4  # nats a token by which one model may differ between machines, float32 sums in another order
Named = tuple[str, dict]  # file, record


def read(path: Path) -> Named:
    """One file of `quantkit eval --json`. Raises QuantkitError naming what is wrong with it."""
    try:
        text = untrusted.read(path).decode("utf-8")
    except OSError as error:
        raise QuantkitError(
            f"{path} cannot be read: {error.strerror}", "quantkit eval … --json > FILE makes one", NOT_FOUND
        ) from error
    except UnicodeDecodeError as error:
        raise _no_result(path, f"not UTF-8 text: {error}") from error
    try:
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _no_result(path, f"not JSON: {error}") from error
    found = record.get("schema") if isinstance(record, dict) else None
    if found != SCHEMA and str(found).startswith("quantkit.eval/"):
        raise QuantkitError(
            f"{path} is {found}, this quantkit reads {SCHEMA}",
            hint="evaluate again with this version",
            exit_code=UNSUPPORTED,
        )
    if fault := _fault(record):
        raise _no_result(path, fault)
    return str(path), record


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _fault(record: Any) -> str | None:
    """The first thing in which a record breaks the schema, limits on numbers and names among it."""
    import jsonschema

    schema = json.loads(Path(__file__).with_name("eval-3.json").read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(record))
    return f"{error.json_path[:120]}: {error.message[:120]}" if error else None


def _no_result(path: Path, why: str) -> QuantkitError:
    return QuantkitError(
        f"{path} is no result of quantkit eval ({why})", "quantkit eval … --json > FILE makes one", USAGE
    )


def merge(results: Sequence[Named]) -> dict:
    """One record of all candidates. The front is drawn anew, gates are collected.

    Raises QuantkitError unless protocol and base are the same in all files, and no model has two results.
    """
    (first_name, first), *others = results
    for name, other in others:
        _check_protocol(first_name, first["data"], name, other["data"])
        if first["tasks"] and other["tasks"]:
            _check_protocol(first_name, first["tasks"], name, other["tasks"])
        _check_base(first_name, first["models"][0], name, other["models"][0])
    base = dict(first["models"][0])
    base["metrics"] = {key: value for _, r in results for key, value in r["models"][0]["metrics"].items()}
    base["metrics"] |= first["models"][0]["metrics"]
    candidates: dict[str, tuple[str, dict]] = {}
    for name, record in results:
        for model in record["models"][1:]:
            before = candidates.setdefault(model["source"], (name, model))
            if before[1] != model:
                raise QuantkitError(
                    f"{before[0]} and {name} hold different results of {model['source']}",
                    hint="it was written anew in between, or evaluated on another machine: leave one out",
                    exit_code=USAGE,
                )
    base["tasks"] = {k: v for _, r in results for k, v in (r["models"][0]["tasks"] or {}).items()} or None
    models = [base, *(model for _, model in candidates.values())]
    gates = [verdict for _, record in results for verdict in record["gates"]]
    merged = first | {
        "models": models,
        "noise_floor": next((r["noise_floor"] for _, r in results if r["noise_floor"]), None),
        "tasks": next((r["tasks"] for _, r in results if r["tasks"]), None),
        "pareto": pareto(models),
        "gates": [gate for index, gate in enumerate(gates) if gate not in gates[:index]],
    }
    merged.pop("error", None)  # that a gate failed stands among the gates
    return merged


def _check_protocol(one: str, ours: dict, other: str, theirs: dict) -> None:
    """The text's name alone may differ."""
    keys = [key for key in ours if ours[key] != theirs[key] and key != "text"]
    if keys:
        differences = ", ".join(f"{key} {_short(ours[key])} and {_short(theirs[key])}" for key in keys)
        raise QuantkitError(
            f"{one} and {other} were measured under different protocols: {differences}",
            hint="figures of unlike protocols cannot be compared: evaluate again, or make two reports",
            exit_code=UNSUPPORTED,
        )


def _check_base(one: str, ours: dict, other: str, theirs: dict) -> None:
    (loss, size), (other_loss, other_size) = (
        (model["metrics"]["nll"]["value"], model["size"]["weight_bytes"]) for model in (ours, theirs)
    )
    alike = loss == other_loss or (None not in (loss, other_loss) and abs(loss - other_loss) <= SAME_NLL)
    if not alike or size != other_size:
        raise QuantkitError(
            f"{one} and {other} compare to different models: {ours['source']} (nll {loss}, {size} bytes) and "
            f"{theirs['source']} (nll {other_loss}, {other_size} bytes)",
            hint="divergences from different models cannot be compared: make two reports",
            exit_code=UNSUPPORTED,
        )


def _short(value: Any) -> str:
    """A value of the protocol, hashes cut."""
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"
