"""What a load made of an endpoint, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from quantkit.errors import count
from quantkit.serving.endpoint import load
from quantkit.serving.endpoint.load import Result
from quantkit.tables import make_table, print_facts, print_line


def show(result: Result, console: Console) -> None:
    """A row a level: milliseconds as p50 / p99, and p50 / p90 / p99 between tokens."""
    facts = {"endpoint": f"{result.url}{result.dialect.path}"}
    facts |= {"model": result.dialect.model} if result.dialect.model else {}
    print_facts(console, facts)
    table = make_table("users" if not result.settings.rates else "rate/s", *COLUMNS)
    table.columns[0].no_wrap = True
    for level in result.levels:
        table.add_row(*_row(level))
    console.print(table)
    for note in (*result.notes, *EXPLAINED):
        print_line(console, note)
    for level in result.levels:
        if level["errors"]:
            print_line(console, f"errors with {_name(level)}: {load.told(level)}", "yellow")


COLUMNS = ("done", "errors", "first token", "between tokens", "tokens/s", "a user")
EXPLAINED = (
    "milliseconds to the first token: p50 / p99, between tokens: p50 / p90 / p99; tokens/s: of all, of one",
)


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
        _figures(level["output_tokens_per_second"]),
        _figures(level["output_tokens_per_second_per_user"]),
    ]


def _milliseconds(found: dict[str, float] | None, names: tuple[str, ...]) -> str:
    """One that is too short for this clock and this program is not told in figures."""
    if found is None:
        return "–"
    told = [1e3 * found[name] for name in names]
    return " / ".join(_figures(value) if value >= 0.1 else "< 0.1" for value in told)


def _figures(value: float | None) -> str:
    """Three of them, or all before the point."""
    return "–" if value is None else f"{value:.{2 if value < 1 else 3}g}" if value < 100 else f"{value:,.0f}"
