"""Tables, facts and sizes as all commands print them. This module never imports torch."""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from quantkit.errors import printable

GAP, EDGES = 3, 2  # cells between two columns of a table; at its sides
NAME = 12  # cells of a name before it is broken; then a table is wider than a narrow terminal
MODEL_BITS = "model bits"  # per weight, over all tensors; "bits/weight" counts quantized matrices only


def megabytes(nbytes: float) -> str:
    """Return a number of bytes as text in MB (10⁶) or GB (10⁹), such as `4.61 MB`."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


def size(nbytes: float) -> str:
    """Return a number of bytes as text in kB (10³), MB or GB, such as `0.51 kB`."""
    return f"{nbytes / 1e3:,.2f} kB" if nbytes < 1e5 else megabytes(nbytes)


def figure(value: float | None) -> str:
    """Return a number with at most two decimals (`0.08`, `4.20`, `17.0`, `1,234`); a dash for None."""
    return "–" if value is None else f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def make_console(stderr: bool = False) -> Console:
    """Return a console for text that is neither highlighted nor markup."""
    return Console(stderr=stderr, highlight=False, markup=False)


def make_table(*columns: str) -> Table:
    """Return an empty table; the first column is for names, the others for numbers that never wrap."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def print_table(console: Console, table: Table, *words: int) -> None:
    """Print a table of strings. words: indices of columns of text, such as lists of blocks, which wrap before
    names in column 0 are broken."""
    widths = []  # that a column needs without breaking a name, a number or a word
    for index, column in enumerate(table.columns):
        cells = [str(cell) for cell in (column.header, *column.cells)]
        if index in words:
            column.justify, column.no_wrap, column.overflow = "left", False, "fold"
            cells = " ".join(cells).split()
        widths.append(max(map(cell_len, cells)))
    others = sum(widths[1:]) + (GAP - table.collapse_padding) * len(widths[1:]) + EDGES
    name = min(widths[0], max(NAME, console.width - others))
    table.columns[0].width = name
    if others + name > console.width:
        table.width = others + name
    console.print(table, crop=False)


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print a line `NAME FACT` for each fact that is not empty."""
    for name, fact in facts.items():
        if fact:
            print_line(console, f"{name:12s} {fact}", indent=13)


def print_refused(console: Console, error: Mapping[str, str] | None) -> None:
    """Print why a job would be refused, if it would. error: JSON object of the error."""
    if error:
        print_facts(console, {"refused": f"{error['message']}: {error['hint']}"})


def print_line(console: Console, text: str, style: str | None = None, indent: int = 2) -> None:
    """Print a line of untrusted text. On a terminal it wraps between words, further lines are indented."""
    if console.is_terminal:
        text = textwrap.fill(
            text,
            console.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print(printable(text), style=style, markup=False, soft_wrap=True)


def print_written(paths: Iterable[object], as_json: bool = False, quiet: bool = False) -> None:
    """Print `wrote PATH` for each path: on stderr if `as_json`, not at all if `quiet`."""
    for path in () if quiet else paths:
        print(printable(f"wrote {path}"), file=sys.stderr if as_json else sys.stdout)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `0-3, 5` for [0, 1, 2, 3, 5]."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
