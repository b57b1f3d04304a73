"""Progress on stderr: a bar on a terminal, lines in a log, only warnings with `--quiet`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from quantkit.errors import printable
from quantkit.quantize.progress import Progress
from quantkit.tables import print_line

if TYPE_CHECKING:
    from quantkit.layouts import LinearSpec

SILENCE = 30.0  # seconds without output after which a log line is printed


class Quiet(Progress):
    """Prints only warnings. Also the base class of the others, for which it estimates the time left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._warned: set[str] = set()
        self._step = ""
        self._counts: dict[str, tuple[float, int]] = {}  # when each count began, and at what
        self._time_from(0, 0)

    def step(self, number: int, total: int) -> None:
        self._step = f"step {number} of {total}: "

    def start(self, blocks: int, done: int) -> None:
        self._time_from(done, blocks)

    def block(self, index: int, replayed: bool) -> None:
        if replayed:
            self._time_from(index + 1, self._total)  # replayed blocks do not count in the estimate

    def linear(self, spec: LinearSpec, record: Mapping[str, Any]) -> None:
        if record["fallback"]:
            self.warn(f"{spec.name}: {record['fallback']}; kept round to nearest")
        for note in record["notes"]:
            self.warn(f"{spec.name}: {note}")

    def _time_from(self, done: int, total: int) -> None:
        """Begin to measure the time of a step, when `done` of `total` steps are done."""
        self._began, self._first, self._total = time.monotonic(), done, total

    def _counted(self, what: str, done: int, total: int) -> bool:
        """Measure a count's time from its own beginning (counts may alternate). Return whether it begins."""
        begins = not done or what not in self._counts
        if begins:
            self._counts[what] = time.monotonic(), done
        (self._began, self._first), self._total = self._counts[what], total
        if done == total:
            del self._counts[what]
        return begins

    def _left(self, done: int) -> str:
        """Return the estimated time left, from the steps since `_time_from` or the count's beginning."""
        if done <= self._first:
            return "--:--"
        each = (time.monotonic() - self._began) / (done - self._first)
        return clock(each * (self._total - done))

    def warn(self, text: str) -> None:
        if text not in self._warned:  # print a warning once for several outputs
            self._warned.add(text)
            print_line(self.console, f"warning: {text}", "yellow")

    def close(self) -> None:
        """Restore the terminal."""


class Lines(Quiet):
    """Prints a line per block, and a line after `silence` seconds without one; for logs and pipes."""

    def __init__(self, silence: float = SILENCE) -> None:
        super().__init__()
        self._doing = "starting"
        self._since = self._spoke = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, args=(silence,), daemon=True).start()

    def _watch(self, silence: float) -> None:
        while not self._closed.wait(max(0.01, self._spoke + silence - time.monotonic())):
            if time.monotonic() - self._spoke >= silence:
                self._say(f"still {self._doing} ({clock(time.monotonic() - self._since)})")

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self.console.print(printable(text), markup=False)

    def _do(self, text: str) -> None:
        """Set the activity that a line after silence names."""
        self._doing, self._since = text, time.monotonic()

    def phase(self, text: str) -> None:
        self._say(f"{self._step}{text}")
        self._do(text)

    def start(self, blocks: int, done: int) -> None:
        super().start(blocks, done)
        self._errors: list[float] = []
        self._do(f"in block 1/{blocks}")
        if done:
            self._say(f"{done} of {blocks} blocks are done already")

    def linear(self, spec: LinearSpec, record: Mapping[str, Any]) -> None:
        super().linear(spec, record)
        self._errors.append(record["error"])
        self._doing = f"in block {spec.block + 1}/{self._total}, after {spec.local}"

    def block(self, index: int, replayed: bool) -> None:
        super().block(index, replayed)
        self._do(f"in block {min(index + 2, self._total)}/{self._total}")
        if replayed:
            self._say(f"block {index + 1}/{self._total} replayed")
            return
        error = f" error {sum(self._errors) / len(self._errors):#.2g}" if self._errors else ""
        self._say(f"block {index + 1}/{self._total}{error} left {self._left(index + 1)}")
        self._errors = []

    def counting(self, what: str, done: int, total: int) -> None:
        if self._counted(what, done, total):
            self._do(what)
        left = f", left {self._left(done)}" if done > self._first else ""
        self._doing = f"{what}: {done} of {total} done{left}"

    def evaluating(self, source: str, done: int, total: int) -> None:
        super().evaluating(source, done, total)
        if done == total:
            self._say(f"evaluated {source}")

    def close(self) -> None:
        self._closed.set()


class Live(Quiet):
    """Shows a bar with block, linear, error, elapsed and remaining time; it pulses if the end is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[steps]}"),
            TextColumn("{task.fields[detail]}", style="dim"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=self.console,
            transient=True,
        )
        self._shown = ""
        self._task = None
        self.phase("starting")
        self._bar.start()

    def phase(self, text: str, total: int | None = None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        if total is None and self.console.no_color:
            total = 1  # Rich moves a bar without an end in colours
        self._task = self._bar.add_task(f"{self._step}{text}", total=total, steps="", detail="", left="")

    def _reach(self, done: int) -> None:
        steps, left = f"{done}/{self._total}", f"left {self._left(done)}"
        self._bar.update(self._task, completed=done, steps=steps, left=left, refresh=True)

    def start(self, blocks: int, done: int) -> None:
        super().start(blocks, done)
        self.phase("block", blocks)
        self._reach(0)

    def linear(self, spec: LinearSpec, record: Mapping[str, Any]) -> None:
        super().linear(spec, record)
        self._bar.update(self._task, detail=f"{spec.local} error {record['error']:#.2g}")

    def block(self, index: int, replayed: bool) -> None:
        super().block(index, replayed)
        self._reach(index + 1)

    def counting(self, what: str, done: int, total: int) -> None:
        if self._counted(what, done, total) or what != self._shown:
            self._shown = what
            self.phase(what, total)
        self._reach(done)

    def close(self) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """Return seconds as `1:02:03` or `02:03`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"
