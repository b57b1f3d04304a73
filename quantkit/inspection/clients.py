"""Find the clients that load a checkpoint, by the rules of clients.yaml."""

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

OUTCOMES = ("loads", "note", "needs", "option")
DAMAGED = "the checkpoint is damaged, see below"
STRANGE = {"hybrid": "blocks of this kind", "towers": "towers of other modalities"}


@cache
def table() -> dict[str, Any]:
    """Return the content of clients.yaml."""
    import yaml

    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def known(facts: Mapping[str, set]) -> list[dict[str, Any]]:
    """Return a row for each client: `client`, `loads` (None: not tried), `note`, `needs` and `option`. facts:
    the properties of the checkpoint, by the keys of clients.yaml."""
    (layout,), tried, rows = facts["layout"], table()["tried"], []
    strange = {fact: words for fact, words in STRANGE.items() if True in facts.get(fact, ())}
    for client, about in table()["clients"].items():
        rule = rule_of(client, facts)
        needs = rule.get("needs", [])
        note = rule.get("note", f"with {' and '.join(needs)} installed" if needs else "")
        outcome = {"loads": rule.get("loads"), "note": note, "needs": needs, "option": rule.get("option", "")}
        untried = [words for fact, words in strange.items() if layout not in tried[fact].get(client, ())]
        if outcome["loads"] and untried:
            outcome |= {"loads": None, "note": f"not tried with {untried[0]}"}
        rows.append({"client": client, "version": about["version"]} | outcome)
    return rows


def load_lines(rows: list[dict[str, Any]], name: str) -> list[tuple[str, str, str]]:
    """Return, for rows of `known` that need no option: (client, line that loads the checkpoint `name`,
    packages that the client needs besides itself, separated by spaces)."""
    named, lines = {"text": repr(name), "word": shlex.quote(name)}, []
    for row in rows:
        line = table()["clients"][row["client"]].get("load")
        if row["loads"] and line and not row["option"]:
            lines.append((row["client"], line.format(**named), " ".join(row["needs"])))
    return lines


def how_to_load(rows: list[dict[str, Any]], name: str) -> str:
    """Return `load_lines` as a Markdown list."""
    lines = [
        f"- {client}: `{line}`" + (f" after `pip install {packages}`" if packages else "")
        for client, line, packages in load_lines(rows, name)
    ]
    return "\n".join(lines) or f"- quantkit: `quantkit serve {shlex.quote(name)}`"


def rule_of(client: str, facts: Mapping[str, set]) -> Mapping[str, Any]:
    """Return the rule (`loads`, `note`, …) that decides whether the client loads these facts, or {}."""
    (layout,) = facts["layout"]
    about, rules = table()["clients"][client], table()["rules"].get(layout, {}).get(client)
    if rules is not None:
        return next((rule for rule in rules if _matches(rule, facts)), {})
    if layout == "none" and about.get("plain"):
        return {"loads": True}
    return {"loads": False, "note": f"it reads {about['reads']}"} if "reads" in about else {}


def of_damaged(rows: list[dict[str, Any]], why: str = DAMAGED) -> list[dict[str, Any]]:
    """Return the rows of `known`, changed such that no client loads the checkpoint."""
    return [row | {"loads": False, "note": why} if row["loads"] else row for row in rows]


def _matches(rule: Mapping[str, Any], facts: Mapping[str, set]) -> bool:
    for key in rule.keys() - set(OUTCOMES):
        listed = set(rule[key]) if isinstance(rule[key], list) else {rule[key]}
        name = key.removeprefix("not_")
        values = facts.get(name, set())
        if not (values - listed if name != key else values & listed):
            return False
    return True
