"""Typer's renderer of help, imported without the half of Rich that no help of ours uses."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# What typer.rich_utils imports for Markdown in help texts and for pretty tracebacks: parser and highlighters.
UNUSED = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}


def prepare() -> None:
    """Import `typer.rich_utils`; the classes named above are imported if they are used after all."""
    if "typer.rich_utils" in sys.modules:
        return
    absent = {module: name for module, name in UNUSED.items() if module not in sys.modules}
    for module, name in absent.items():
        stand_in = ModuleType(module)
        setattr(stand_in, name, _Deferred(name, (), {"__module__": module}))
        sys.modules[module] = stand_in
    try:
        importlib.import_module("typer.rich_utils")
    finally:
        for module in absent:  # whoever else imports them gets the real ones
            del sys.modules[module]


class _Deferred(type):
    """Stands for the class of its name and module, which is imported when it is called or looked into."""

    def _real(cls) -> Any:
        return getattr(importlib.import_module(cls.__module__), cls.__name__)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls._real()(*arguments, **options)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._real(), name)
