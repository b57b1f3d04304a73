"""Small files of strangers: read whole, so believed only as far as they are plain files and small."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError

SMALL_BYTES = 1 << 26  # no file that is parsed whole may be larger
UNSAID = 1 << 16  # bytes of files that say they have none, as those under /proc
VALUES = 8_000_000  # of JSON: each becomes an object of up to a hundred bytes
DEEP = 64  # lists and objects inside one another


def refuse_irregular(path: Path) -> None:
    """Raise QuantkitError for a pipe, a device or a socket, which may never end. OSError is the caller's."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise QuantkitError(f"{path} is no plain file", "copy what it gives into one", UNSUPPORTED)


def read(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """Its bytes. Raises QuantkitError for what is no plain file, or is larger; OSError where it cannot be
    read."""
    refuse_irregular(path)
    size = max(path.stat().st_size, UNSAID)
    with open(path, "rb") as file:
        data = file.read(min(limit, size) + 1)
    if len(data) > min(limit, size):
        raise QuantkitError(
            f"{path} is larger than {limit / 2**20:g} MiB: not read", "download it again", UNSUPPORTED
        )
    return data


def parse(data: bytes, values: int = VALUES) -> Any:
    """Parse a JSON text. Raises ValueError if it is malformed, too deep, or may hold too many values.

    values: the most that are parsed, because a value takes far more memory than its text.
    """
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > values:
        raise ValueError(f"more than {values:,} values")
    try:
        found = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(found)
    return found


def _check_depth(tree: Any) -> None:
    """Raise ValueError for lists in lists beyond what code that calls itself for each can take."""
    inside = [tree]
    for _ in range(DEEP):
        inside = [
            value
            for node in inside
            if isinstance(node, (dict, list))
            for value in (node.values() if isinstance(node, dict) else node)
        ]
        if not inside:
            return
    raise ValueError("it is nested too deeply")


def check_schema(
    found: Any, schema: dict[str, Any], name: str, hint: str, exit_code: int = UNSUPPORTED
) -> None:
    """Raise QuantkitError if parsed JSON from outside does not match a JSON schema.

    The message names `name`, the path inside the document and the first rule that is broken.
    """
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(found))
    if error is not None:
        raise QuantkitError(f"{name}: {error.json_path}: {error.message}", hint, exit_code)
