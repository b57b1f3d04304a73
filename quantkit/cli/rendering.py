"""Typer's renderer of help, imported without the half of Rich that no help of ours uses."""

from __future__ import annotations

import gc
import importlib
import sys

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
    if "torch" not in sys.modules:
        # The process ends after this help. Python would look through all there is for garbage before.
        gc.freeze()
