"""sha256 sums of what was written, in the manifest of a folder and in the metadata of a GGUF file.

They show damage, not forgery: a forger of a file can change its sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path

IN_FILE = "quantkit.tensors_sha256"  # of everything after the header of a GGUF file
BLANK = "0" * 64  # where it will stand
PIECE = 1 << 22


def of_folder(
    folder: Path, leave: Collection[str], listen: Callable[[int], None] = lambda nbytes: None
) -> dict[str, str]:
    """Return the sha256 of every file but those to `leave`, by name. listen: receives the bytes as they are
    read."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in leave)
    return {path.name: of_file(path, listen=listen) for path in files}


def of_file(path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of a file from a byte on."""
    digest = hashlib.sha256()
    add(digest, path, start, listen)
    return digest.hexdigest()


def add(digest, path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> None:
    """Add the bytes of a file, from a byte on, to a digest of hashlib."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(PIECE):
            digest.update(piece)
            listen(len(piece))


def of_tensors(path: Path, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of everything after the header of a GGUF file."""
    from quantkit.models.files import gguf_file

    return of_file(path, gguf_file.read_whole_header(path).tensors, listen)


def seal(path: Path) -> None:
    """Put the sum of its tensors into a GGUF file, where its metadata has a place for it."""
    from quantkit.models.files import gguf_file

    header = gguf_file.read_whole_header(path)
    if IN_FILE in header.places:
        digest = of_file(path, header.tensors)
        with open(path, "r+b") as file:
            file.seek(header.places[IN_FILE][1] - len(BLANK))  # a text ends its entry
            file.write(digest.encode())
