"""Gates: limits on the loss of a candidate, for continuous integration.

A gate compares the measured value with its limit and ignores the standard error. NaN fails.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import GATE, USAGE, QuantkitError, require

OPERATORS = {"<=": (operator.le, "≤"), ">=": (operator.ge, "≥")}
NAMES = {  # metric -> its name, and whether it is written as a percentage
    "dppl.relative": ("perplexity increase", True),
    "dppl.value": ("perplexity increase", False),
    "kld.mean": ("KL divergence", False),
    "top1": ("top-1 agreement", True),
}


@dataclass(frozen=True)
class Gate:
    """A limit. metric: path in a model's metrics, as `kld.mean`. op: `<=` or `>=`."""

    flag: str
    metric: str
    op: str
    limit: float


def parse(max_ppl_increase: str | None, max_kld: str | None, min_top1: str | None) -> list[Gate]:
    """Return the gates for the texts of three flags. Raises QuantkitError for an invalid limit.

    max_ppl_increase: `2%` (of the base's perplexity) or `0.5` (a difference of perplexities). max_kld: nats.
    min_top1: `0.9` or `90%`.
    """
    relative = (max_ppl_increase or "").strip().endswith("%")
    increase = "dppl.relative" if relative else "dppl.value"
    gates = []
    for flag, metric, op, text, example, most in (
        ("--max-ppl-increase", increase, "<=", max_ppl_increase, "2% or 0.5", math.inf),
        ("--max-kld", "kld.mean", "<=", max_kld, "0.05", math.inf),
        ("--min-top1", "top1", ">=", min_top1, "0.9 or 90%", 1.0),
    ):
        if text is not None:
            gates.append(Gate(flag, metric, op, _limit(flag, text, example, most)))
    return gates


def _limit(flag: str, text: str, example: str, most: float) -> float:
    """Parse a limit; a percentage becomes a share of 1. Raises QuantkitError."""
    percent = text.strip().endswith("%")
    try:
        limit = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        limit = math.nan
    if not (0 <= limit <= most and math.isfinite(limit)) or (percent and "%" not in example):
        raise QuantkitError(f"{flag} {text!r} is not a limit", f"for example {flag} {example}", USAGE)
    return limit


def check(gates: Sequence[Gate], chosen: frozenset[str], candidates: int) -> None:
    """Raise QuantkitError if a gate's metric is not measured, or if there are no candidates."""
    for gate in gates:
        needed = gate.metric.partition(".")[0]
        what = f"{gate.flag} needs {needed}, which --metrics leaves out"
        require(needed in chosen, what, f"add {needed}", USAGE)
    for gate in gates[:1]:
        what = f"{gate.flag} compares candidates to the first model, but there is no candidate"
        require(candidates, what, "give a second checkpoint, or --as METHOD", USAGE)


def look_up(model: dict, path: str) -> float | None:
    """Return the value at a path such as `metrics.kld.mean`; None if it was not measured."""
    value: Any = model
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def judge(gates: Sequence[Gate], models: Sequence[dict]) -> list[dict]:
    """Return the verdict of every gate on every candidate as JSON. models: records, the base first; the base
    in an engine is no candidate."""
    verdicts, candidates = [], models[1:]
    if candidates and candidates[0].get("engine"):
        candidates = candidates[1:]
    for gate in gates:
        for model in candidates:
            value = look_up(model["metrics"], gate.metric)
            passed = value is not None and OPERATORS[gate.op][0](value, gate.limit)
            limit = {"metric": gate.metric, "op": gate.op, "limit": gate.limit}
            verdicts.append(limit | {"model": model["source"], "value": value, "pass": passed})
    return verdicts


def describe(verdict: dict, label: str) -> str:
    """Return a line such as `KL divergence of model is 0.0713, limit ≤ 0.05`."""
    name, share = NAMES[verdict["metric"]]

    def written(value: float | None) -> str:
        if value is None:
            return "not a number"
        return f"{100 * value:.4g} %" if share else f"{value:.4g}"

    limit = f"{OPERATORS[verdict['op']][1]} {written(verdict['limit'])}"
    return f"{name} of {label} is {written(verdict['value'])}, limit {limit}"


def refuse_failed(record: dict) -> None:
    """Raise QuantkitError (exit code 7), with all failed gates and the record, if a gate failed."""
    verdicts = record["gates"]
    failed = [describe(verdict, verdict["model"]) for verdict in verdicts if not verdict["pass"]]
    if failed:
        what = f"{len(failed)} of {len(verdicts)} gates failed: " + "; ".join(failed)
        hint = "use more bits or smaller groups, or another method; the result is complete all the same"
        raise QuantkitError(what, hint, GATE, record)
