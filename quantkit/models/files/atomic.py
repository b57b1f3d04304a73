"""Write a file completely or not at all, under a temporary name that nobody can predict."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new empty file that replaces `path` on success and is removed on an error.

    The file has a random name and is created with O_EXCL, so no existing link or file of that name is written
    to. A link at `path` itself is replaced, not followed. Raises OSError.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
