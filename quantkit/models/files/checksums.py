"""sha256 sums of written tensors, stored in the manifest of a folder or in the metadata of a GGUF file.

Sums detect damage, not forgery: whoever forges a file can change its sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantkit.models.files import untrusted

IN_FILE = "quantkit.tensors_sha256"  # sum of all bytes after the header of a GGUF file
IN_SHARD = "quantkit.shard_sha256"  # the same for a shard; a merged file would inherit IN_FILE from the first
BLANK = "0" * 64  # reserved for the sum
PIECE = 1 << 22


def of_folder(
    folder: Path, leave: Collection[str], listen: Callable[[int], None] = lambda nbytes: None
) -> dict[str, str]:
    """Return the sha256 of every file by name, except the names in `leave`. listen: called with the number of
    bytes of each piece that is read."""
    files = sorted(path for path in untrusted.entries(folder) if path.is_file() and path.name not in leave)
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        sums = pool.map(lambda path: of_file(path, listen=listen), files)
        return {path.relative_to(folder).as_posix(): sha256 for path, sha256 in zip(files, sums, strict=True)}


def of_file(path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of a file from byte `start` on; listen as in `of_folder`."""
    digest = hashlib.sha256()
    add(digest, path, start, listen)
    return digest.hexdigest()


def add(digest, path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> None:
    """Add the bytes of a file, from byte `start` on, to a hashlib digest; listen as in `of_folder`."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(PIECE):
            digest.update(piece)
            listen(len(piece))


def of_tensors(path: Path, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of everything after the header of a GGUF file."""
    from quantkit.models.files import gguf_file

    return of_file(path, gguf_file.read_whole_header(path).tensors, listen)


def fill(path: Path, key: str, text: str) -> None:
    """Write a text into a GGUF file's metadata, where space is reserved for it; nothing without `key`."""
    from quantkit.models.files import gguf_file

    header = gguf_file.read_whole_header(path)
    if span := header.places.get(key):
        room = len(header.metadata[key])
        data = text.encode().ljust(room)
        assert len(data) == room, f"{key} has {room} bytes: {text}"
        with open(path, "r+b") as file:
            file.seek(span[1] - room)  # the text is at the end of its entry
            file.write(data)


def seal(path: Path) -> None:
    """Write the sha256 of a GGUF file's tensors into its metadata, where space is reserved for the sum."""
    from quantkit.models.files import gguf_file

    for key in gguf_file.read_whole_header(path).places.keys() & {IN_FILE, IN_SHARD}:
        fill(path, key, of_tensors(path))
