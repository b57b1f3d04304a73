"""Where the data that comes with quantkit lies."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """`recipes` or `calibration`: inside the installed package, or beside it in a source tree."""
    inside = Path(__file__).parent / "data" / name
    return inside if inside.is_dir() else Path(__file__).parent.parent / name
