"""What a load made of an endpoint, for people."""

from __future__ import annotations

from typing import Any

from quantkit.errors import count
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.serving.endpoint.load import told
from quantkit.tables import figure

HEADERS = ("done", "errors", "first token", "between tokens", "tokens/s", "a user")
EXPLAINED = (
    "milliseconds to the first token: p50 / p99, between tokens: p50 / p90 / p99; tokens/s: of all, of one"
)


def report(record: dict[str, Any]) -> Report:
    """A row a level: milliseconds as p50 / p99, and p50 / p90 / p99 between tokens."""
    facts = {"endpoint": f"{record['url']}{record['api']}"}
    facts |= {"model": record["model"]} if record["model"] else {}
    headers = ("rate/s" if record["settings"]["rates"] else "users", *HEADERS)
    notes = [(note, "") for note in (*record["notes"], EXPLAINED)]
    for level in record["levels"]:
        if level["errors"]:
            notes.append((f"errors with {_name(level)}: {told(level)}", "yellow"))
    rows = [_row(level) for level in record["levels"]]
    return Report(record["url"], [Table(headers, [("", rows)])], facts, notes)


def _name(level: dict[str, Any]) -> str:
    return count(level["users"], "user") if "users" in level else f"{level['rate']:g} requests a second"


def _row(level: dict[str, Any]) -> list[str]:
    failed = sum(level["errors"].values())
    return [
        str(level["users"]) if "users" in level else f"{level['rate']:g}",
        str(level["completed"]),
        str(failed) if failed else "–",
        _milliseconds(level["ttft_seconds"], ("p50", "p99")),
        _milliseconds(level["itl_seconds"], ("p50", "p90", "p99")),
        figure(level["output_tokens_per_second"]),
        figure(level["output_tokens_per_second_per_user"]),
    ]


def _milliseconds(found: dict[str, float] | None, names: tuple[str, ...]) -> str:
    """One that is too short for this clock and this program is not told in figures."""
    if found is None:
        return "–"
    told = [1e3 * found[name] for name in names]
    return " / ".join(figure(value) if value >= 0.1 else "<0.1" for value in told)
