"""Tables and facts on stdout, as all commands print them. No torch here."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from quantkit.errors import printable


def stdout() -> Console:
    """A console as wide as the terminal is; a file or pipe has no width."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)


def megabytes(nbytes: float) -> str:
    """Decimal units, as disks and hubs count."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def size(nbytes: float) -> str:
    """The same, for what may be small."""
    return f"{nbytes / 1e3:,.2f} kB" if nbytes < 1e5 else megabytes(nbytes)


def figure(value: float | None) -> str:
    """Three digits, or as many as the whole part has: `0.08`, `4.20`, `17.0`, `1,234`; a dash for None."""
    return "–" if value is None else f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def make_table(*columns: str) -> Table:
    """A table whose first column is words, and the others are figures that stay on one line."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """A fact a line, its name before it."""
    for name, fact in facts.items():
        print_line(console, f"{name:12s} {fact}", indent=13)


def print_line(console: Console, text: str, style: str | None = None, indent: int = 2) -> None:
    """A line, whoever wrote what is in it: on a terminal wrapped between words, else as long as it is."""
    if console.is_terminal:
        text = textwrap.fill(
            text,
            console.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,5` for [0, 1, 2, 3, 5]."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
