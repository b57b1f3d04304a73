"""Which clients are known to load a checkpoint: the rules of clients.yaml, applied to its facts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

OUTCOMES = ("loads", "note")
DAMAGED = "the checkpoint is damaged, see below"


def known(facts: Mapping[str, set]) -> list[dict[str, Any]]:
    """Each client with `loads` (None: not tried) and `note`; `facts`: the values that linears have."""
    found = []
    for row in _rows():
        rule = next((rule for rule in row["rules"] if _matches(rule, facts)), {})
        outcome = {"loads": rule.get("loads"), "note": rule.get("note", "")}
        found.append({"client": row["client"], "version": row["version"]} | outcome)
    return found


@cache
def _rows() -> list[dict[str, Any]]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name("clients.yaml").read_text(encoding="utf-8"))


def of_damaged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of a checkpoint that is damaged: nobody loads it as it was meant."""
    return [row | {"loads": False, "note": DAMAGED} if row["loads"] else row for row in rows]


def _matches(rule: Mapping[str, Any], facts: Mapping[str, set]) -> bool:
    for key, wanted in rule.items():
        if key in OUTCOMES:
            continue
        listed = set(wanted) if isinstance(wanted, list) else {wanted}
        name = key.removeprefix("not_")
        values = facts.get(name, set())
        if not (values - listed if name != key else values & listed):
            return False
    return True
