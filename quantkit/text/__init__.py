"""Calibration text: reads, renders and tokenizes it, and records its origin."""

from pathlib import Path


def shipped_folder(name: str) -> Path:
    """Return the folder `recipes`, `calibration` or `heldout`: in the installed package or in the sources."""
    package = Path(__file__).parents[1]
    inside = package / "data" / name
    return inside if inside.is_dir() else package.parent / name
