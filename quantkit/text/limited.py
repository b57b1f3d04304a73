"""Code of strangers, such as chat templates, run where it can do no harm: in a child that ends when its time,
memory or output is used up. A loop in a loop, or a string times a number, is all that a template needs.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable

SECONDS = 10.0
MEMORY = 256 << 20  # bytes beyond what the process has already
TEXT = 16 << 20  # bytes of the result
STOPS = (signal.SIGINT, signal.SIGTERM)  # their handlers raise


class Failed(Exception):
    """The work raised; its message is that of the error."""


class Runaway(Exception):
    """The work was ended; the message says why."""


def run(work: Callable[[], str], seconds: float = SECONDS) -> str:
    """What `work` returns. Raises Failed, or Runaway.

    The child is a fork, which costs milliseconds and needs nothing to be handed over; it runs `work` alone.
    """
    reader, writer = os.pipe()
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # or one could raise in the child, before `try`
    try:
        child = os.fork()
    except OSError:  # no process left
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        raise
    if not child:
        try:
            os.close(reader)
            for stop in STOPS:
                signal.signal(stop, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
            _work(work, writer, seconds)
        finally:  # whatever was raised: it would go on as a copy of the parent
            os._exit(0)  # neither handlers nor buffers of the parent
    os.close(writer)
    ended = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        said = _read(reader, time.monotonic() + seconds)
    except Runaway as error:
        os.kill(child, signal.SIGKILL)
        ended = error
    except BaseException:  # asked to stop
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    if ended:
        raise ended
    if not said:
        raise Runaway(f"it took {MEMORY >> 20} MiB of memory, or {seconds:g} seconds")
    kind, text = json.loads(said)
    if kind == "text":
        return text
    raise {"failed": Failed, "runaway": Runaway}[kind](text)


def _work(work: Callable[[], str], writer: int, seconds: float) -> None:
    """The child: it says one thing. What to say of no memory is made while there is some, and said once the
    error is gone, whose traceback holds what filled it."""
    full = json.dumps(["runaway", f"it took more than {MEMORY >> 20} MiB of memory"]).encode()
    odd = json.dumps(["failed", "it raised what is no error"]).encode()
    try:
        _limit(seconds)
        said = _said(work)
    except MemoryError:
        said = full
    except BaseException:  # SystemExit, a panic of a library in Rust, an error whose text raises another
        said = odd
    while said:
        said = said[os.write(writer, said) :]


def _limit(seconds: float) -> None:
    """Give this process a limit of memory and of processor time."""
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    except (OSError, ValueError):  # a system without /proc: time and output are limited all the same
        pass
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))


def _said(work: Callable[[], str]) -> bytes:
    """What the work returned, or how it failed. Raises MemoryError, and what is no Exception."""
    try:
        return json.dumps(["text", work()]).encode()
    except RecursionError:
        return json.dumps(["runaway", "it calls itself without end"]).encode()
    except MemoryError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return json.dumps(["failed", first]).encode()


def _read(reader: int, deadline: float) -> bytes:
    """All that the child says. Raises Runaway."""
    parts, size = [], 0
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Runaway("it does not end")
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > TEXT:
            raise Runaway(f"it writes more than {TEXT >> 20} MiB")
