"""Rendering of untrusted chat templates in a worker process with limited memory and time.

Nested loops or a repeated string in a template can exhaust memory and time. The worker is a new Python
process, since a fork of a process with threads may hang. It renders conversations with transformers' own
sandbox and ends with its parent. After a template exceeds its limits, a new worker is started.
"""

import atexit
import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

SECONDS = 10.0
WORKER_SECONDS = 300.0  # to import transformers on a busy machine
MEMORY_BYTES = 256 << 20  # bytes that rendering may add to the worker's size
LIMIT = 16 << 20  # maximum characters of the result
TELLS_NULL = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none\b")  # templates that test for null
ANSWER = 6 * LIMIT + 1024  # maximum bytes of an answer: JSON takes up to six per common character


class Failed(Exception):
    """Raised if a template fails; contains the template's message."""


class Runaway(Exception):
    """Raised if a template exceeds its limits; says which."""


class Worker:
    """Renders templates in another process, which is started when first needed."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen, Connection] | None = None
        self._owner = 0  # process id: a fork of this process must not use its parent's worker
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        answer: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a conversation as text. tokens: special tokens by name. answer: end where one begins. tools:
        JSON schemas of functions.

        Raises Failed if the template fails, and Runaway if it takes too much time, memory or text.
        """
        try:
            request = json.dumps([template, messages, tokens, answer, tools], default=_plain)
        except RecursionError as error:
            raise Failed("the messages are nested too deeply") from error
        with self._lock:
            try:
                if self._running is None or self._owner != os.getpid():
                    self._start()
                kind, text = self._ask(request.encode())
                if kind == "runaway":
                    raise Runaway(text)
            except BaseException:  # after an interrupt, the next request would get this answer
                self.stop()
                raise
        if kind == "failed":
            raise Failed(text)
        return text

    def _start(self) -> None:
        ours, theirs = Pipe()
        process = subprocess.Popen(  # multiprocessing would run the parent's script again
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C only reaches the parent
        )
        theirs.close()
        self._running, self._owner = (process, ours), os.getpid()
        if not ours.poll(WORKER_SECONDS) or not _received(ours):
            raise OSError("the worker for chat templates does not start: python -c 'import transformers'")

    def _ask(self, request: bytes) -> list[str]:
        _, pipe = self._running
        full = Runaway(f"it took {MEMORY_BYTES >> 20} MiB of memory, or {SECONDS:g} seconds")
        try:
            pipe.send_bytes(request)
        except OSError as error:  # it has ended
            raise full from error
        if not pipe.poll(SECONDS):
            raise Runaway("it does not end")
        if not (answered := _received(pipe)):
            raise full
        return json.loads(answered)

    def stop(self) -> None:
        """End the worker process, if this process has started one."""
        running, self._running = self._running, None
        if running is not None and self._owner == os.getpid():
            process, pipe = running
            process.kill()
            process.wait()
            pipe.close()


WORKER = Worker()


def _plain(value: Any) -> Any:
    """Return a NumPy number as a Python number, and any other object as the name of its type."""
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else f"<{type(value).__name__}>"


def _received(pipe: Connection) -> bytes:
    """Return a message of the worker; b"" if it has ended or sends too much."""
    try:
        return pipe.recv_bytes(ANSWER)
    except (EOFError, OSError):
        return b""


def _serve(pipe: Connection) -> None:
    """Answer requests until the parent ends or a template runs out of memory."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):  # a system without /proc: time and output are limited all the same
        pass
    # allocated now: after a MemoryError there may be no memory for it
    full = json.dumps(["runaway", f"it took more than {MEMORY_BYTES >> 20} MiB of memory"]).encode()
    pipe.send_bytes(b"ready")
    while request := _received(pipe):
        try:
            asked = json.loads(request, object_pairs_hook=_said)
            answered = json.dumps(_answer(render_jinja_template, asked)).encode()
        except MemoryError:
            answered = full
        pipe.send_bytes(answered)


def _said(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without nulls: in rows of an Arrow table all objects have the same keys, and
    templates ask for keys (`'image' in part`)."""
    return {key: value for key, value in pairs if value is not None}


def _answer(render_template: Any, request: list[Any]) -> list[str]:
    """Render a request; return the text, or the error of the template. Raises MemoryError."""
    template, messages, tokens, answer, tools = request
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime + SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + 2, resource.RLIM_INFINITY))  # if the parent has ended
    try:
        arguments = {"chat_template": template, "add_generation_prompt": answer, **tokens}
        for message in messages:  # a message that calls tools has no content; most templates expect a text
            message.setdefault("content", None if TELLS_NULL.search(template) else "")
        text = render_template(conversations=[messages], tools=tools, **arguments)[0][0]
    except RecursionError:
        return ["runaway", "it calls itself without end"]
    except MemoryError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return ["failed", first]
    return ["text", text] if len(text) <= LIMIT else ["runaway", f"it writes more than {LIMIT >> 20} MiB"]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
