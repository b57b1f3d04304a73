"""sha256 sums of written files, stored in the manifest of a folder or in the metadata of a GGUF file.

Sums detect damage, not forgery: whoever forges a file can change its sum.
"""

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from quantkit.models.files import untrusted

IN_FILE = "quantkit.sha256"  # sum of a GGUF file without this entry and the loss, which come later
IN_SHARD = "quantkit.shard_sha256"  # the same for a shard; a merged file would inherit IN_FILE from the first
BLANK = "0" * 64  # reserved for the sum
PIECE = 1 << 22


def of_folder(
    folder: Path, leave: Collection[str] = (), listen: Callable[[int], None] = lambda nbytes: None
) -> dict[str, str]:
    """Return the sha256 of every file by name, except the names in `leave`; listen as in `add`."""
    files = sorted(path for path in untrusted.entries(folder) if path.is_file() and path.name not in leave)
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        sums = zip(files, pool.map(partial(of_file, listen=listen), files), strict=True)
        return {path.relative_to(folder).as_posix(): sha256 for path, sha256 in sums}


def of_file(
    path: Path, head: bytes | bytearray = b"", listen: Callable[[int], None] = lambda nbytes: None
) -> str:
    """Return the sha256 of a file, with `head` in place of as many of its first bytes; listen as in `add`."""
    digest = hashlib.sha256(head)
    add(digest, path, len(head), listen)
    return digest.hexdigest()


def add(digest, path: Path, start: int = 0, listen: Callable[[int], None] = lambda nbytes: None) -> None:
    """Add the bytes of a file, from byte `start` on, to a hashlib digest. listen: called with the number of
    bytes of each piece that is read."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while piece := file.read(PIECE):
            digest.update(piece)
            listen(len(piece))
