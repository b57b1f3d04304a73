"""Commands under torchrun: decides which process prints, and ends all processes together.

The work of the ranks is in `quantkit/models/machine/distributed.py`, which is imported only under torchrun.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, require


def process_count() -> int:
    """Return the number of processes that torchrun set in the environment; 1 without torchrun."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1


def refuse_letters() -> None:
    """Raise QuantkitError if a variable of torchrun in the environment is not a number."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = os.environ.get(name) or "0"
        hint = "start the processes with torchrun; or unset WORLD_SIZE and RANK for one process"
        require(text.isdecimal(), f"{name}={text!r} in the environment is not a number", hint, USAGE)


def refuse(what: str, supported: bool = False) -> None:
    """Raise QuantkitError if the command does not support several processes."""
    message = f"{what} does not run as several processes, but {process_count()} were started"
    serve = "several processes serve eval, imatrix, and methods that calibrate (gptq, awq, gguf and others)"
    require(supported, message, f"start it without torchrun; {serve}", UNSUPPORTED)


def is_first() -> bool:
    """Return whether this process is the one that shows progress."""
    return process_count() == 1 or os.environ.get("RANK", "0") == "0"


def fail(error: QuantkitError, tell: Callable[[QuantkitError], None]) -> None:
    """End this process with the error of the rank that failed first. One rank prints it."""
    if process_count() == 1:
        return
    from quantkit.models.machine import distributed

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # signals must not interrupt the following
    ending, speaks = distributed.verdict(error)
    if speaks:
        tell(ending)
    end(ending.exit_code)


def end(exit_code: int) -> None:
    """End a rank at once, because torch threads that wait for another rank would delay its exit."""
    if process_count() == 1:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader may be gone
            stream.flush()
    os._exit(exit_code)


def typed(*more: str) -> str:
    """Return the command as typed, torchrun included, with further arguments."""
    words = ["quantkit", *(word for word in sys.argv[1:] if word not in more), *more]
    if (whole := process_count()) > 1:
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or whole)
        nodes = ["--nnodes", str(whole // here)] if whole > here else []
        words = ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", *words]
    return shlex.join(words)
