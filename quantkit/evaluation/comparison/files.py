"""Output files of a comparison: page, plots, summary. Unwritable paths are rejected before measuring."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation.comparison.figures import Figure
from quantkit.models.files import untrusted
from quantkit.tables import print_written

Text = Callable[[], str]
MARKDOWN = ("", ".md", ".markdown", ".txt")  # "" is for $GITHUB_STEP_SUMMARY


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

    def write(self, figures: Sequence[Figure], page: Text, summary: Text = str, **how: bool) -> None:
        """Write the files and print their paths. page, summary: return HTML and Markdown."""
        written = []
        if self.summary:
            with writing(self.summary), self.summary.open("a", encoding="utf-8") as file:
                file.write(summary())
            written.append(self.summary)
        if self.html:
            with writing(self.html):
                self.html.write_text(page(), encoding="utf-8")
            written.append(self.html)
        for position, figure in enumerate(figures if self.plot else ()):
            from quantkit.evaluation.comparison import drawing  # matplotlib takes a second to import

            path = self.plot
            if position:
                path = path.with_name(f"{path.stem}-{figure.key}{path.suffix}")
            with writing(path):
                if path.suffix == ".png":
                    drawing.png(figure, path)
                else:
                    path.write_text(drawing.document(figure), encoding="utf-8")
            written.append(path)
        print_written(written, **how)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSErrors in the context into a QuantkitError about writing `path`."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, f"cannot be written: {error.strerror}") from error


def _unwritable(path: Path, why: str) -> QuantkitError:
    return QuantkitError(f"{path} {why}", "choose another place, in a folder that exists", USAGE)
