"""Checks that a model's files do not change while a job reads them: for hours, and twice. A result of two
models would be no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import QuantkitError, name_all
from quantkit.models.files.checkpoint import Checkpoint, State


def look(place: Path) -> dict[Path, State]:
    """Return the state of every file of a folder, or of one file."""
    files = place.iterdir() if place.is_dir() else [place]
    return {path: _state(path) for path in files if path.is_file()}


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check(checkpoint: Checkpoint) -> None:
    """Raise QuantkitError naming the files that are no longer as they were when it was opened."""
    wrong = [
        f"{path.name} {'changed' if path.exists() else 'gone'}"
        for path, state in sorted(checkpoint.seen.items())
        if not path.exists() or (path.is_file() and _state(path) != state)
    ]
    if wrong:
        raise QuantkitError(
            f"{checkpoint.source} was changed while it was read: {name_all(wrong)}",
            "let nothing write there meanwhile; put it back as it was and use --resume, or begin anew with "
            "--overwrite",
        )


@contextmanager
def watched(checkpoint: Checkpoint) -> Iterator[None]:
    """Check at the end, also after an error, whose cause a change may be."""
    try:
        yield
    except Exception:
        check(checkpoint)
        raise
    check(checkpoint)
