"""An engine's processes, in a process group of their own.

The terminal sends Ctrl-C only to quantkit's group; quantkit then stops the engine and its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from contextlib import suppress
from typing import BinaryIO

from quantkit.errors import NOT_FOUND, QuantkitError, printable
from quantkit.serving.server.command import ServerCommand

LAST_LINES = 15  # lines shown of an engine that ended
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


class EngineProcess:
    """A running engine. last: the last lines of its output."""

    def __init__(self, command: ServerCommand, output: BinaryIO | None):
        """Start the engine; copy what it prints to `output`, if given.

        Raises QuantkitError if the program is missing.
        """
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
        self._reader = threading.Thread(target=self._pass_on, args=(output,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Return the id of the process and of its group."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the engine's end; return its exit code, or None if it runs longer than `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)  # the last lines
        return code

    def stop(self) -> None:
        """Send SIGTERM to the engine and its children, then SIGKILL after a delay or at Ctrl-C."""
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                self.wait(GRACE)
        finally:
            self._signal(signal.SIGKILL)
            self.wait(GRACE)

    def failure(self, what: str) -> QuantkitError:
        """Return an error with the message `what` and the engine's last lines."""
        self._reader.join(0.5)  # the last lines may not have been read yet
        lines = [printable(line).strip() for line in self.last if line.strip()]
        output = f"; last lines: {' / '.join(lines)}" if lines else ", without output"
        hint = "run the command of quantkit serve … --print by itself"
        if "out of memory" in output.lower() or "failed to allocate" in output.lower():
            hint = "a shorter --ctx, a smaller --parallel, or a smaller model: see quantkit plan"
        return QuantkitError(what + output, hint)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group that still run."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: all are dead
            os.killpg(self.pid, number)

    def _pass_on(self, output: BinaryIO | None) -> None:
        stream = self._process.stdout
        assert stream is not None
        for line in iter(stream.readline, b""):
            self.last.append(line.decode("utf-8", "replace").rstrip())
            try:
                if output is not None:
                    output.write(line)
                    output.flush()
            except (OSError, ValueError):  # nobody reads the output any more; the engine goes on
                output = None
