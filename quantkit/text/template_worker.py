"""Chat templates of strangers run where they can do no harm: in a worker with little memory and time.

A loop in a loop, or a string times a number, is all that a template needs. The worker is a fresh Python:
a fork of a process whose libraries run threads may hang. It renders one conversation after the other with
transformers' own sandbox, ends with its parent, and is replaced after a template that ran away.

    python quantkit/text/template_worker.py     (the worker: requests and answers are lines of JSON)
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 10.0
START_SECONDS = 300.0  # to import transformers on a machine with other work
MEMORY = 256 << 20  # bytes beyond what the worker has after its imports
TEXT = 16 << 20  # characters of the result
ANSWER = 6 * TEXT + 1024  # bytes of an answer: JSON writes a character in six at most, but for rare ones


class Failed(Exception):
    """The template raised; the message is that of the error."""


class Runaway(Exception):
    """The worker was ended; the message says why."""


class Worker:
    """A process that renders templates, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._owner = 0  # a fork of this process must not talk to its parent's worker
        self._one = threading.Lock()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        answer: bool,
        seconds: float,
    ) -> str:
        """Return the text of a conversation. tokens: special ones by name; answer: up to where one begins.

        Raises Failed where the template raises, and Runaway where it takes too much time, memory or text.
        """
        try:
            request = json.dumps([template, messages, tokens, answer, seconds], default=_plain)
        except RecursionError as error:
            raise Failed("the messages are nested too deeply") from error
        with self._one:
            try:
                process = self._running()
                kind, text = self._ask(process, request.encode() + b"\n", seconds)
                if kind == "runaway":
                    raise Runaway(text)
            except BaseException:  # an interrupt, too: its answer would be taken for the next one's
                self.stop()
                raise
        if kind == "failed":
            raise Failed(text)
        return text

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is its parent's
            )
            self._owner = os.getpid()
            atexit.register(self.stop)
            if not _read(self._process, START_SECONDS):
                raise OSError(
                    "the worker for chat templates does not start: python -m quantkit.text.template_worker"
                )
        return self._process

    def _ask(self, process: subprocess.Popen, request: bytes, seconds: float) -> list[str]:
        try:
            process.stdin.write(request)
            process.stdin.flush()
            said = _read(process, seconds)
        except BrokenPipeError:
            said = b""
        if not said:
            raise Runaway(f"it took {MEMORY >> 20} MiB of memory, or {seconds:g} seconds")
        return json.loads(said)

    def stop(self) -> None:
        """End the worker, if this process has one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        atexit.unregister(self.stop)
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stdin):
            try:
                pipe.close()
            except BrokenPipeError:  # a request that it has not read
                pass


WORKER = Worker()


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, str],
    answer: bool = False,
    seconds: float = SECONDS,
) -> str:
    """Return the text of a conversation by this process's worker. Raises Failed, or Runaway."""
    return WORKER.render(template, messages, tokens, answer, seconds)


def _plain(value: Any) -> Any:
    """A number of numpy as Python's; for other objects the name of their type, as transformers does."""
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else f"<{type(value).__name__}>"


def _read(process: subprocess.Popen, seconds: float) -> bytes:
    """A line of the worker; empty where it has ended. Raises Runaway."""
    parts, size, deadline = [], 0, time.monotonic() + seconds
    while not (parts and parts[-1].endswith(b"\n")):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Runaway("it does not end")
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            return b""
        parts.append(part)
        size += len(part)
        if size > ANSWER:
            raise Runaway(f"it writes more than {TEXT >> 20} MiB")
    return b"".join(parts)


def main() -> None:
    """Answer requests until stdin ends, or a template has used up the memory."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nobody else writes there
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):  # a system without /proc: time and output are limited all the same
        pass
    # made while there is memory, and said once the error is gone, whose traceback holds what filled it
    full = json.dumps(["runaway", f"it took more than {MEMORY >> 20} MiB of memory"]).encode()
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        try:
            said = json.dumps(_said(render_jinja_template, json.loads(line))).encode()
        except MemoryError:
            said = full
        answers.write(said + b"\n")
        answers.flush()


def _said(render_template: Any, request: list[Any]) -> list[str]:
    """The text, or how the template failed. Raises MemoryError."""
    template, messages, tokens, answer, seconds = request
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + 2, resource.RLIM_INFINITY))  # should the parent be gone
    try:
        given = {"chat_template": template, "add_generation_prompt": answer, **tokens}
        text = render_template(conversations=[messages], **given)[0][0]
    except RecursionError:
        return ["runaway", "it calls itself without end"]
    except MemoryError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return ["failed", first]
    return ["text", text] if len(text) <= TEXT else ["runaway", f"it writes more than {TEXT >> 20} MiB"]


if __name__ == "__main__":
    main()
