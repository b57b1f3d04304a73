"""A comparison as a table: on a terminal as wide as it is, or in Markdown for a pull request."""

from __future__ import annotations

from quantkit.evaluation.comparison.columns import columns, floor_note, label_by_source, protocol, rows
from quantkit.evaluation.comparison.gates import describe, in_words
from quantkit.evaluation.comparison.report import Report, Table


def print_comparison(record: dict) -> None:
    """The table, split where the terminal is too narrow for all columns, and what it holds for."""
    headers = ["model", *(column.header for column in columns(record))]
    names = label_by_source(record)
    lines = [protocol(record), floor_note(record)]
    for verdict in record["gates"]:
        passed = "passed" if verdict["pass"] else "FAILED"
        lines.append(f"gate {passed}: {describe(verdict, names[verdict['model']])}")
    found = Table(headers, [("", [row.cells for row in rows(record)])])
    Report("", [found], notes=[(line, "") for line in lines if line]).show()


def markdown(record: dict) -> str:
    """GitHub-flavoured Markdown: gates first, then the table and its protocol."""
    lines = [f"### {gates_line(record)}", ""]
    if record["gates"]:
        names = label_by_source(record)
        verdicts = [_gate_cells(verdict, names[verdict["model"]]) for verdict in record["gates"]]
        lines += [*_grid(["gate", "model", "metric", "value", "limit"], verdicts), ""]
    headers = ["model", *(column.header for column in columns(record))]
    lines += [*_grid(headers, [row.cells for row in rows(record)]), ""]
    lines += [_escape(line) + "  " for line in (protocol(record), floor_note(record)) if line]
    return "\n".join(lines) + "\n\n"  # the next step's summary begins its own paragraph


def gates_line(record: dict) -> str:
    """`quantkit eval: 1 of 3 gates failed`."""
    verdicts = [verdict["pass"] for verdict in record["gates"]]
    if not verdicts:
        return "quantkit eval"
    failed = f"{verdicts.count(False)} of {len(verdicts)} gates failed"
    return f"quantkit eval: {'all gates passed' if all(verdicts) else failed}"


def _gate_cells(verdict: dict, label: str) -> list[str]:
    name, value, limit = in_words(verdict)
    return ["✅ passed" if verdict["pass"] else "❌ failed", label, name, value, limit]


def _grid(headers: list[str], found: list[list[str]]) -> list[str]:
    """A table whose columns are aligned to the right, but for the names."""
    rule = ["---" if header in ("gate", "model", "metric") else "---:" for header in headers]
    lines = [f"| {' | '.join(map(_escape, cells))} |" for cells in (headers, *found)]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _escape(text: str) -> str:
    """Text of a user as it is, not as markup."""
    for character in "\\`*_{}[]<>#|~&":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
