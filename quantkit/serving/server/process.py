"""An engine's processes, in a process group of their own, until the server has answered and ended.

The terminal sends Ctrl-C only to quantkit's group; quantkit then stops the engine and its children.
"""

import json
import os
import signal
import subprocess
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from quantkit.errors import NOT_FOUND, QuantkitError, first_line, printable
from quantkit.models.files import untrusted
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.server.job import Prepared

LAST_LINES = 15  # lines shown of an engine that ended
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
TOKENS = 16  # of the first answer
ASK_SECONDS = 0.25  # seconds between two health checks
PROOF_SECONDS = 300.0  # timeout of the first answer, which may have to build kernels
MOST_BYTES = 1 << 22  # maximum of an answer; the rest is not read
BY_ITSELF = "run the command of quantkit serve … --print by itself"
SHOWN_CHARACTERS = 300  # characters of a server's message that are shown


class EngineProcess:
    """A running engine. last: the last lines of its output."""

    def __init__(self, prepared: Prepared, output: BinaryIO | None = None):
        """Start the engine; copy what it prints to `output`, if given.

        Raises QuantkitError if the program is missing.
        """
        self.prepared, self.name, command = prepared, prepared.offer.engine, prepared.command
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            message = f"{command.argv[0]} cannot be started: {error.strerror}"
            raise QuantkitError(message, "check that it is installed and executable", NOT_FOUND) from error
        self.pid = self._process.pid  # of the process and of its group
        self._reader = threading.Thread(target=self._pass_on, args=(output,), daemon=True)
        self._reader.start()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the engine's end; return its exit code, or None if it runs longer than `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)  # the last lines
        return code

    def wait_until_healthy(self) -> float:
        """Return the seconds until the engine is healthy. Raises QuantkitError if it ends or is too slow."""
        began, limit = time.monotonic(), self.prepared.settings.start_timeout
        health = self.prepared.url.removesuffix("/v1") + "/health"
        while (waited := time.monotonic() - began) < limit:
            if (code := self.wait(ASK_SECONDS)) is not None:
                raise self.ended(code, " while starting")
            with suppress(QuantkitError):  # it does not listen yet
                request(health, min(5.0, limit))
                return waited
        hint = "a large model may need more: --start-timeout"
        raise self.failure(f"{self.name} was not healthy within {limit:g} s", hint)

    def first_answer(self) -> dict[str, Any]:
        """Request an answer with default sampling, which transformers keeps; return it as JSON."""
        path, prompt, body = self.prepared.request()
        began, key = time.monotonic(), self.prepared.settings.api_key
        try:
            data = request(self.prepared.url + path, PROOF_SECONDS, body | {"max_tokens": TOKENS}, key)
        except QuantkitError as error:
            what = f"{self.name} is healthy, but answers no request: {error.message}"
            raise self.failure(what) from error
        seconds = time.monotonic() - began
        try:
            answer = untrusted.parse(data)
            choice, usage = answer["choices"][0], answer.get("usage")
            message = choice.get("message") or {}
            text = choice.get("text") or message.get("content") or message.get("reasoning_content") or ""
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self.failure(f"{self.name} answers with no completion") from error
        return {"api": path, "prompt": prompt, "text": str(text), "usage": usage, "seconds": seconds}

    def stop(self) -> None:
        """Send SIGTERM to the engine and its children, then SIGKILL after a delay or at Ctrl-C."""
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                self.wait(GRACE)
        finally:
            self._signal(signal.SIGKILL)
            self.wait(GRACE)

    def ended(self, code: int, when: str = "") -> QuantkitError:
        """Return the error for an engine that ended by itself, with exit code `code`."""
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return self.failure(f"{self.name} ended {how}{when}")

    def failure(self, what: str, hint: str = BY_ITSELF) -> QuantkitError:
        """Return an error with the message `what` and the engine's last lines."""
        self._reader.join(0.5)  # the last lines may not have been read yet
        lines = [printable(line).strip() for line in self.last if line.strip()]
        output = f"; last lines: {' / '.join(lines)}" if lines else ", without output"
        if "out of memory" in output.lower() or "failed to allocate" in output.lower():
            hint = "a shorter --ctx, a smaller --parallel, or a smaller model: see quantkit plan"
        return QuantkitError(what + output, hint)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group that still run."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: all are dead
            os.killpg(self.pid, number)

    def _pass_on(self, output: BinaryIO | None) -> None:
        for line in iter(self._process.stdout.readline, b""):
            self.last.append(line.decode("utf-8", "replace").rstrip())
            try:
                if output is not None:
                    output.write(line)
                    output.flush()
            except (OSError, ValueError):  # nobody reads the output any more; the engine goes on
                output = None


@contextmanager
def serving(
    prepared: Prepared, listen: Progress = SILENT, output: BinaryIO | None = None
) -> Iterator[tuple[EngineProcess, dict[str, Any]]]:
    """Start the server; yield the engine and its first answer as JSON; stop the engine on exit.

    output: receives what the engine prints. Raises QuantkitError, with the engine's last lines, if it ends or
    does not answer.
    """
    engine = EngineProcess(prepared, output)
    try:
        listen.phase(f"waiting for {engine.name} to be healthy")
        seconds = engine.wait_until_healthy()
        listen.phase("asking for a completion")
        yield engine, {"started_seconds": seconds} | engine.first_answer()
    finally:
        engine.stop()


def request(url: str, timeout: float, body: Mapping[str, Any] | None = None, key: str | None = None) -> bytes:
    """Return the answer to a POST of `body` as JSON, or to a GET. Redirects and proxies are not followed.

    timeout: seconds without a byte. key: API key. Raises QuantkitError, without the key.
    """
    address = urlsplit(url)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with closing(HTTPConnection(address.netloc, timeout=timeout)) as connection:
            connection.request("POST" if body else "GET", address.path, body and json.dumps(body), headers)
            response = connection.getresponse()
            answer = response.read(MOST_BYTES)
    except (OSError, HTTPException) as error:
        raise QuantkitError(f"{url} cannot be reached: {first_line(error)}") from error
    if response.status != 200:
        text = answer.decode("utf-8", "replace").replace(key or "\0", "…").strip()
        shown = textwrap.shorten(text, SHOWN_CHARACTERS, placeholder=" …")
        raise QuantkitError(f"the server answers {response.status} {response.reason}: {shown}")
    return answer
