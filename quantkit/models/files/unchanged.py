"""Whether the files of a model are still those that were opened: a job reads them for hours, twice, and what
it makes of two models at once is no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from quantkit.errors import QuantkitError, name_all

State = tuple[int, int, int, int]  # device, inode, bytes, and when it was last written (ns)


class Watched(Protocol):
    """What has files: a checkpoint."""

    source: str
    seen: Mapping[Path, State]


def look(place: Path) -> dict[Path, State]:
    """The files of a folder, or one file, as they are now."""
    return {path: state for path in _files(place) if (state := _state(path))}


def _files(place: Path) -> Iterable[Path]:
    return (path for path in place.iterdir() if path.is_file()) if place.is_dir() else (place,)


def _state(path: Path) -> State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check(checkpoint: Watched) -> None:
    """Raise QuantkitError naming the files that are no longer as they were when it was opened."""
    if error := _error(checkpoint):
        raise error


@contextmanager
def watched(checkpoint: Watched) -> Iterator[None]:
    """Check at the end, and blame what has changed for whatever is raised meanwhile."""
    try:
        yield
    except Exception as error:
        if changed := _error(checkpoint):
            raise changed from error
        raise
    check(checkpoint)


def _error(checkpoint: Watched) -> QuantkitError | None:
    now = {path: _state(path) for path in checkpoint.seen}
    gone = sorted(path.name for path, state in now.items() if state is None)
    other = sorted(path.name for path, state in now.items() if state not in (None, checkpoint.seen[path]))
    if not gone and not other:
        return None
    told = [f"{name_all(names)} {word}" for names, word in ((other, "changed"), (gone, "gone")) if names]
    return QuantkitError(
        f"{checkpoint.source} was changed while it was read: {'; '.join(told)}",
        "let nothing write there meanwhile; put it back as it was and use --resume, or begin anew with "
        "--overwrite",
    )
