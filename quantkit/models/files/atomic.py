"""Write a file whole or not at all, under a name that nobody else can have prepared."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new empty file that replaces `path` on success and is removed on an error.

    The file has a random name and is created with O_EXCL, so neither a link nor another file of that name is
    ever written through. A link at `path` itself is replaced, not followed. Raises OSError.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
