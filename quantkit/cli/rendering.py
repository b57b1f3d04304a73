"""Typer's renderer of help, imported without the half of Rich that no help of ours uses."""

from __future__ import annotations

import importlib

from quantkit.cli.stand_ins import deferred, standing_in

# For Markdown in help texts and for pretty tracebacks; with them come a parser and the highlighters.
UNUSED = {
    "rich.markdown": deferred("rich.markdown", "Markdown"),
    "rich.traceback": deferred("rich.traceback", "Traceback"),
}


def prepare() -> None:
    """Import `typer.rich_utils`, for a help that is rendered next."""
    with standing_in(UNUSED):
        importlib.import_module("typer.rich_utils")
