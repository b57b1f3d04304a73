"""A report: printed on a terminal, or written as an HTML page with plots. Paths that cannot be written are
rejected before measuring."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quantkit.errors import DISK, RESOURCES, USAGE, QuantkitError, printable
from quantkit.evaluation.comparison.figures import Figure
from quantkit.models.files import untrusted
from quantkit.tables import GAP, make_console, make_table, print_facts, print_line, print_written

Rows = Sequence[Sequence[str]]
MARKDOWN = ("", ".md", ".markdown", ".txt")  # "" is for $GITHUB_STEP_SUMMARY


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

    def show(self) -> None:
        """Print facts, tables and notes."""
        console = make_console()
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


# ---- files


@dataclass(frozen=True)
class Outputs:
    """Paths of the output files; None for files that are not written. plot: `NAME.svg` or `NAME.png`, for the
    first plot; other plots add their key, as in NAME-speed.svg."""

    html: Path | None = None
    plot: Path | None = None
    summary: Path | None = None

    def check(self) -> None:
        """Raise QuantkitError, with the path, if a file cannot be written or has the wrong suffix."""
        for path in filter(None, (self.html, self.plot, self.summary)):
            folder = path.parent
            if path.is_dir():
                raise _unwritable(path, "is a folder")
            if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
                raise _unwritable(path, "cannot be written there")
        if self.summary and self.summary.exists():
            with writing(self.summary):
                odd = {"\0", "\ufffd"} & set(untrusted.read(self.summary).decode(errors="replace"))
            if odd or self.summary.suffix.lower() not in MARKDOWN:
                what = f"--summary {self.summary} is not a Markdown file: nothing is appended"
                raise QuantkitError(what, "choose a new file, or one that ends in .md", USAGE)
        if self.html and self.html.suffix not in (".html", ".htm"):
            hint = f"try {self.html.with_suffix('.html')}"
            raise QuantkitError(f"{self.html}: a page is .html", hint, USAGE)
        if self.plot and self.plot.suffix not in (".svg", ".png"):
            hint = f"try {self.plot.with_suffix('.svg')}"
            raise QuantkitError(f"--plot {self.plot}: plots are .svg or .png", hint, USAGE)

    def write(self, report: Report, summary: Callable[[], str] = str, **how: bool) -> None:
        """Write the files of a report and print their paths. summary: returns Markdown."""
        written = []
        if self.summary:
            with writing(self.summary), self.summary.open("a", encoding="utf-8") as file:
                file.write(summary())
            written.append(self.summary)
        if self.html:
            with writing(self.html, whole=True):
                self.html.write_text(report.page(), encoding="utf-8")
            written.append(self.html)
        for position, figure in enumerate(report.figures if self.plot else ()):
            from quantkit.evaluation.comparison import drawing  # matplotlib takes a second to import

            path = self.plot
            if position:
                path = path.with_name(f"{path.stem}-{figure.key}{path.suffix}")
            with writing(path, whole=True):
                if path.suffix == ".png":
                    drawing.png(figure, path)
                else:
                    path.write_text(drawing.document(figure), encoding="utf-8")
            written.append(path)
        print_written(written, **how)


@contextmanager
def writing(path: Path, whole: bool = False) -> Iterator[None]:
    """Turn OSErrors in the context into a QuantkitError about writing `path`. whole: the context writes the
    whole file, so a part of it is removed."""
    try:
        yield
    except OSError as error:
        if whole and path.is_file():
            path.unlink()
        raise _unwritable(path, f"cannot be written: {error.strerror}", error.errno) from error


def _unwritable(path: Path, why: str, number: int | None = None) -> QuantkitError:
    if number in DISK:
        return QuantkitError(f"{path} {why}", DISK[number][1], RESOURCES)
    return QuantkitError(f"{path} {why}", "choose another place, in a folder that exists", USAGE)
