"""Commands as several processes, started by torchrun: who speaks, how they end together, how to go on.

What the ranks do is `quantkit/models/machine/ranks.py`; here is what a user sees of it. Nothing of it is
imported, or costs anything, where nobody started several.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError


def wanted() -> int:
    """How many processes there are to be, by the environment that torchrun makes."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1


def refuse(what: str, supported: bool = False) -> None:
    """Raise QuantkitError for what one process does alone, unless it is supported."""
    if not supported:
        raise QuantkitError(
            f"{what} does not run as several processes, and {wanted()} were started",
            "start it without torchrun; several processes serve eval, imatrix, and methods that calibrate "
            "(gptq, awq, gguf and others)",
            UNSUPPORTED,
        )


def is_first() -> bool:
    """Whether this process is the one that shows progress."""
    return wanted() == 1 or os.environ.get("RANK", "0") == "0"


def end(error: QuantkitError, tell: Callable[[QuantkitError], None]) -> None:
    """Of several processes, end this one as all others end; one of them tells the error."""
    if wanted() == 1:
        return
    from quantkit.models.machine import ranks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on nothing is to come in between
    ending, speaks = ranks.verdict(error)
    if speaks:
        tell(ending)
    ranks.leave(speaks)
    flush(sys.stdout)
    os._exit(ending.exit_code)  # operations of the others may never end


def flush(stream: Any) -> None:
    """What was printed is on its way, if anybody reads it."""
    try:
        stream.flush()
    except OSError:
        return  # its reader is gone, and so is this process


@contextmanager
def resumable(kept: str, again: str) -> Iterator[None]:
    """Meanwhile a rank that is lost leaves something to go on from."""
    if wanted() == 1:
        yield
        return
    from quantkit.models.machine import ranks

    hint = f"{kept}; continue, with any number of processes, with: {again}"
    ranks.keep(hint)
    try:
        yield
    except QuantkitError as error:
        raise QuantkitError(error.message, error.hint or hint, error.exit_code, error.found) from error
    ranks.keep("")


def launcher() -> list[str]:
    """What a command begins with when it is typed."""
    if wanted() == 1:
        return ["quantkit"]
    here, whole = int(os.environ.get("LOCAL_WORLD_SIZE") or wanted()), wanted()
    nodes = ["--nnodes", str(whole // here)] if whole > here else []
    return ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "quantkit"]
