"""Results on stdout; streams that are closed or not Unicode; text typed in a locale without Unicode."""

from __future__ import annotations

import codecs
import io
import json
import locale
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quantkit.errors import USAGE, QuantkitError

SIGNS = "–—−─━│…→←▶×·•±≈≤≥ΣΔµ‖“”‘’█✓"
PLAIN = dict(
    zip(SIGNS, """-----|.><>x.*~~<>Sdu|""''#y""", strict=True)
)  # replacements of the same width, for encodings without these signs


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that cannot be encoded; an error handler for `codecs.register_error`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def decoded(text: str, name: str) -> str:
    """Decode bytes as UTF-8 that Python has escaped because the locale's encoding lacks them.

    Raises QuantkitError (exit code 2) if they are not UTF-8. name: what the message calls the text.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        encoding = f"{locale.setlocale(locale.LC_CTYPE)} ({sys.getfilesystemencoding()})"
        hint = f"the locale is {encoding}: convert the text, or set LC_ALL to that of your terminal"
        raise QuantkitError(f"{name} is neither in the locale's encoding nor UTF-8", hint, USAGE) from error


def prepare() -> None:
    """Make printing safe: closed streams discard text, and encodings without Unicode get plain characters."""
    codecs.register_error("plain", _plain)
    if hasattr(sys.stdin, "reconfigure"):
        with suppress(io.UnsupportedOperation):  # stdin was read before: a caller in the same process
            sys.stdin.reconfigure(errors="surrogateescape")  # see `decoded`
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="plain")


def present(
    record: Any, as_json: bool, show: Callable[[], object], refuse: Callable[[], object] = bool, **how: Any
) -> None:
    """Print a result with `show`, or as JSON. how: arguments of json.dumps.

    refuse: raises an error for a bad result. An error prints the record itself, if it is printed as JSON.
    """
    if not as_json:
        show()
    refuse()
    if as_json:
        print(json.dumps(record, indent=2, **how))
