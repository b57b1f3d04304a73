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
from typing import NoReturn

SECONDS = 10.0
MEMORY = 256 << 20  # bytes beyond what the process has already
TEXT = 16 << 20  # bytes of the result


class Failed(Exception):
    """The work raised; its message is that of the error."""


class Runaway(Exception):
    """The work was ended; the message says why."""


def run(work: Callable[[], str], seconds: float = SECONDS) -> str:
    """What `work` returns. Raises Failed, or Runaway.

    The child is a fork, which costs milliseconds and needs nothing to be handed over; it runs `work` alone.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(work, writer, seconds)
    os.close(writer)
    ended = None
    try:
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


def _work(work: Callable[[], str], writer: int, seconds: float) -> NoReturn:
    """The child: it says one thing, and never returns."""
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    except (OSError, ValueError):  # a system without /proc: time and output are limited all the same
        pass
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        said = json.dumps(["text", work()])
    except MemoryError:
        said = json.dumps(["runaway", f"it took more than {MEMORY >> 20} MiB of memory"])
    except RecursionError:
        said = json.dumps(["runaway", "it calls itself without end"])
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        said = json.dumps(["failed", first])
    try:
        with open(writer, "wb") as file:
            file.write(said.encode())
    finally:
        os._exit(0)  # neither handlers nor buffers of the parent


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
