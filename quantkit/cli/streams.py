"""Results on stdout, progress on stderr; closed streams; text and streams in a locale without Unicode."""

from __future__ import annotations

import codecs
import gc
import io
import json
import locale
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from quantkit.cli import ranks
from quantkit.errors import USAGE, QuantkitError

if TYPE_CHECKING:
    from quantkit.cli.progress import Quiet

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
    """Decode bytes as UTF-8 that Python has escaped because the locale's encoding lacks them. Raises
    QuantkitError (exit code 2) if they are not UTF-8. name: what the message calls the text."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        encoding = f"{locale.setlocale(locale.LC_CTYPE)} ({sys.getfilesystemencoding()})"
        hint = f"the locale is {encoding}: convert the text, or set LC_ALL to that of your terminal"
        raise QuantkitError(f"{name} is neither in the locale's encoding nor UTF-8", hint, USAGE) from error


def prepare() -> None:
    """Make printing safe: closed streams discard text, and encodings without Unicode get plain characters."""
    codecs.register_error("plain", _plain)
    if sys.stdin is None:  # closed by the parent process
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
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
    """Print a result with `show`, or as JSON. how: arguments of json.dumps. refuse: raises an error for a bad
    result. An error prints the record itself, if it is printed as JSON."""
    if not as_json:
        show()
    refuse()
    if as_json:
        print(json.dumps(record, indent=2, **how))


@contextmanager
def listener(quiet: bool, computes: bool = True) -> Iterator[Quiet]:
    """Yield the progress display for stderr; of several processes, only the first prints. computes: import
    torch and transformers, which takes seconds, while the display is there."""
    from quantkit.cli.progress import Console, Lines, Live, Quiet  # Rich takes a while to import

    notebook = Console(stderr=True).is_jupyter
    capable = notebook or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    progress = Quiet() if quiet or not ranks.is_first() else Live() if capable else Lines()
    progress.console.quiet = not ranks.is_first()
    try:
        if computes:
            with uncollected():
                import quantkit.models.skeleton  # noqa: F401
        yield progress
    finally:
        progress.close()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during the context: it takes an eighth of the time of imports, in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
