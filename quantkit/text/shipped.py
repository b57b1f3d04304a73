"""Finds the data that comes with quantkit."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Return the folder `recipes` or `calibration`: in the installed package or in the source tree."""
    package = Path(__file__).parents[1]
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / name
