"""The folder of the data that comes with quantkit."""

from __future__ import annotations

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """`recipes` or `calibration`: inside the installed package, or next to the package in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / name
