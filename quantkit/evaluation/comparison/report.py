"""A report: printed on a terminal, or written as an HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quantkit.errors import printable
from quantkit.evaluation.comparison.figures import Figure
from quantkit.tables import GAP, make_table, print_facts, print_line

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """A table. groups: (heading or "", rows of cells). meanings: explanations of columns. units: units of
    columns whose header and cells do not name them. The page shows both. explained: whether a terminal prints
    the meanings."""

    headers: Sequence[str]
    groups: Sequence[tuple[str, Rows]]
    meanings: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    explained: bool = False

    def print(self, console: Console) -> None:
        """Print the table; on a narrow console, print several tables with some of the columns each."""
        rows = [cells for _, group in self.groups for cells in group]
        names = [[heading, *[""] * (len(self.headers) - 1)] for heading, _ in self.groups]
        for kept in split(self.headers, [*rows, *names], console.width):
            drawn = make_table(*(self.headers[index] for index in kept))
            for heading, group in self.groups:
                drawn.add_section()
                if heading:
                    drawn.add_row(Text(printable(heading), style="bold"))
                for cells in group:
                    if any(cells[index] for index in kept[1:]):  # skip rows without values
                        drawn.add_row(*(Text(printable(cells[index])) for index in kept))
            console.print(drawn)
        if self.explained:
            print_line(console, "; ".join(f"{name}: {meaning}" for name, meaning in self.meanings.items()))


@dataclass(frozen=True)
class Report:
    """A report, printed in the order facts, tables, notes. facts: name and text. notes: (line, rich style).
    more: facts under a heading; only the page shows these and the plots."""

    title: str
    tables: Sequence[Table]
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    more: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def show(self, console: Console | None = None) -> None:
        """Print facts, tables and notes."""
        console = console or Console(highlight=False, markup=False)
        print_facts(console, self.facts)
        for table in self.tables:
            table.print(console)
        for text, style in self.notes:
            print_line(console, text, style)

    def page(self) -> str:
        """Return the report as one HTML file. report.html is its template; names are escaped."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        from quantkit.evaluation.comparison import drawing  # matplotlib takes a second to import

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            finalize=lambda value: drawing.shown(value) if type(value) is str else value,
        )
        return environment.get_template("report.html").render(drawing=drawing, title=self.title, report=self)


def split(headers: Sequence[str], cells: Rows, width: int) -> list[list[int]]:
    """Return the column indices of each table, such that tables fit `width` characters. Column 0 is in
    every table."""
    widths = [max(map(cell_len, column)) for column in zip(headers, *cells, strict=True)]
    parts = [[0]]
    for index in range(1, len(headers)):
        if len(parts[-1]) > 1 and sum(widths[k] + GAP for k in (*parts[-1], index)) - 1 > width:
            parts.append([0])
        parts[-1].append(index)
    return parts
