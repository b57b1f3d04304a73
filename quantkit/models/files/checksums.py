"""sha256 sums of written tensors, stored in the manifest of a folder or in the metadata of a GGUF file.

Sums detect damage, not forgery: whoever forges a file can change its sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

IN_FILE = (
    "quantkit.tensors_sha256"  # of a GGUF file; in shards: of all in the first, of its own in the others
)
BLANK = "0" * 64  # where it will stand
PIECE = 1 << 22


def of_folder(
    folder: Path, leave: Collection[str], listen: Callable[[int], None] = lambda nbytes: None
) -> dict[str, str]:
    """Return the sha256 of every file by name, except the names in `leave`. listen: called with the number of
    bytes of each piece that is read."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in leave)
    return {path.name: of_file(path, listen=listen) for path in files}


def of_file(path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of a file from byte `start` on; listen as in `of_folder`."""
    digest = hashlib.sha256()
    add([digest], path, start, listen)
    return digest.hexdigest()


def add(digests, path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> None:
    """Add the bytes of a file, from byte `start` on, to hashlib digests; listen as in `of_folder`."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(PIECE):
            for digest in digests:
                digest.update(piece)
            listen(len(piece))


def of_tensors(shards: Sequence[Path], listen: Callable[[int], None] = lambda nbytes: None) -> list[str]:
    """Return the sha256 of everything after the headers of a GGUF file's shards, which is that of the same
    tensors in one file, and then those of each shard but the first."""
    from quantkit.models.files import gguf_file

    digests = [hashlib.sha256() for _ in shards]
    for path, digest in zip(shards, digests, strict=True):
        add({digests[0], digest}, path, gguf_file.read_whole_header(path).tensors, listen)
    return [digest.hexdigest() for digest in digests]


def seal(shards: Sequence[Path]) -> None:
    """Write the sums of `of_tensors` into the metadata of a GGUF file, where space is reserved for them."""
    from quantkit.models.files import gguf_file

    for path, digest in zip(shards, of_tensors(shards), strict=True):
        if place := gguf_file.read_whole_header(path).places.get(IN_FILE):
            with open(path, "r+b") as file:
                file.seek(place[1] - len(BLANK))  # a text ends its entry
                file.write(digest.encode())
