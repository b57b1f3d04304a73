"""A benchmark as a table on a terminal as wide as it is."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from quantkit.errors import printable
from quantkit.evaluation.comparison.table import split
from quantkit.serving.bench.columns import best_batches, called, columns, failures, noise, protocol, rows
from quantkit.tables import make_table, print_line


def show(record: dict[str, Any], quiet: bool = False) -> None:
    """The table, split where the terminal is too narrow for all columns; what failed; what it holds for."""
    wide = 10_000  # a file or pipe has no width
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else wide)
    headers = ["model", *(column.header for column in columns(record))]
    parts = list(rows(record))
    found = [row.cells for _, part in parts for row in part]
    names = [[called(point), *[""] * (len(headers) - 1)] for point, _ in parts] if len(parts) > 1 else []
    for kept in split(headers, found + names, console.width):
        drawn = make_table(*(headers[index] for index in kept))
        for position, (point, part) in enumerate(parts):
            if names:
                if position:
                    drawn.add_section()
                drawn.add_row(Text(called(point), style="bold"))
            for row in part:
                drawn.add_row(*(Text(printable(row.cells[index])) for index in kept))
        console.print(drawn)
    for line in failures(record):
        print_line(console, f"not run: {line}", "yellow")
    if noisy := noise(record):
        print_line(console, f"noisy: {noisy}", "yellow")
    for line in best_batches(record):
        print_line(console, line)
    for line in () if quiet else protocol(record):
        print_line(console, line, "dim")
