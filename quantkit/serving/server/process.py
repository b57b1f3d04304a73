"""An engine's processes: started in a group of their own, listened to, and ended with all their children.

The group is not the terminal's, so that Ctrl-C reaches quantkit alone, which ends the engine in order.
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
from quantkit.serving.server.command import Command

LAST = 15  # lines that are shown of an engine that died
GRACE = 10.0  # seconds between being asked to end and being killed


class Engine:
    """A running engine. `last` holds the last lines it printed, whether or not they were passed through."""

    def __init__(self, command: Command, output: BinaryIO | None):
        """Start it; what it prints goes to `output`, if there is one, as it comes.

        Raises QuantkitError where the program is not there.
        """
        self.last: deque[str] = deque(maxlen=LAST)
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
            raise QuantkitError(message, "is it installed, and may it be run?", NOT_FOUND) from error
        self._reader = threading.Thread(target=self._pass_on, args=(output,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process that was started; also the number of its group."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, once it has ended; None where it has not within `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)  # what it said last
        return code

    def stop(self) -> None:
        """Ask it and its children to end, and end them. Interrupted in that, end them at once."""
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                self.wait(GRACE)
        finally:
            self._signal(signal.SIGKILL)
            self.wait(GRACE)

    def failure(self, what: str) -> QuantkitError:
        """Return the error of an engine that ended or does not answer, with its last lines."""
        lines = [printable(line).strip() for line in self.last if line.strip()]
        said = f"; it said last: {' / '.join(lines)}" if lines else ", without a word"
        hint = "run the command by itself: quantkit serve … --print"
        if "out of memory" in said.lower() or "failed to allocate" in said.lower():
            hint = "a shorter --ctx, a smaller --parallel, or a smaller model: see quantkit plan"
        return QuantkitError(what + said, hint)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group: those that are left of it."""
        with suppress(ProcessLookupError, PermissionError):  # the latter: macOS, of a group of the dead
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
            except (OSError, ValueError):  # nobody reads it any more: the engine goes on all the same
                output = None
