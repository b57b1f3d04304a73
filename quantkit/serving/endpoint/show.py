"""The printed result of `quantkit bench server`."""

from __future__ import annotations

from typing import Any

from quantkit.errors import count
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.serving.endpoint.load import failures
from quantkit.tables import figure

HEADERS = ("users", "done", "errors", "first token", "between tokens", "tokens/s", "a user")
EXPLAINED = (
    "milliseconds to the first token: p50 / p99, between tokens: p50 / p90 / p99; tokens/s: of all, of one"
)


def report(record: dict[str, Any]) -> Report:
    """Return a report: a table with one row per level of load."""
    facts = {"endpoint": f"{record['url']}{record['api']}"}
    facts |= {"model": record["model"]} if record["model"] else {}
    notes = [(note, "") for note in (*record["notes"], EXPLAINED)]
    for level in record["levels"]:
        if level["errors"]:
            notes.append((f"errors with {count(level['users'], 'user')}: {failures(level)}", "yellow"))
    rows = [_row(level) for level in record["levels"]]
    return Report(record["url"], [Table(HEADERS, [("", rows)])], facts, notes)


def _row(level: dict[str, Any]) -> list[str]:
    failed = sum(level["errors"].values())
    return [
        str(level["users"]),
        str(level["completed"]),
        str(failed) if failed else "–",
        _milliseconds(level["ttft_seconds"], ("p50", "p99")),
        _milliseconds(level["itl_seconds"], ("p50", "p90", "p99")),
        figure(level["output_tokens_per_second"]),
        figure(level["output_tokens_per_second_per_user"]),
    ]


def _milliseconds(found: dict[str, float] | None, names: tuple[str, ...]) -> str:
    return " / ".join(figure(1e3 * found[name]) for name in names) if found else "–"
