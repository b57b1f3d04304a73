"""Progress on stderr: a bar on a terminal, plain lines in a log, nothing but warnings when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from quantkit.progress import Progress
from quantkit.solvers import Solved
from quantkit.spec import LinearSpec


class Quiet(Progress):
    """Warnings only; the base of the other two. Keeps the arithmetic of the estimated time."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._warned: set[str] = set()
        self._blocks = 0
        self._finished = 0
        self._computed = 0
        self._began = time.monotonic()

    def start(self, blocks: int, done: int) -> None:
        self._blocks, self._finished, self._computed = blocks, 0, 0
        self._began = time.monotonic()

    def block(self, index: int, replayed: bool) -> None:
        self._finished = index + 1
        if replayed:
            self._began = time.monotonic()  # replayed blocks say nothing about how long the others take
        else:
            self._computed += 1

    def linear(self, spec: LinearSpec, solved: Solved) -> None:
        if solved.fallback:
            self.warn(f"{spec.name}: {solved.fallback}; kept round to nearest")
        for note in solved.notes:
            self.warn(f"{spec.name}: {note}")

    def remaining(self) -> str:
        """Estimated time left, from the blocks computed in this run."""
        if not self._computed:
            return "--:--"
        each = (time.monotonic() - self._began) / self._computed
        return clock(each * (self._blocks - self._finished))

    def warn(self, text: str) -> None:
        if text in self._warned:  # several outputs of one command have much in common
            return
        self._warned.add(text)
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    def evaluating(self, source: str, done: int, total: int) -> None:
        """A block of a model was evaluated."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines(Quiet):
    """One line per block: for logs and pipes."""

    def phase(self, text: str) -> None:
        self.console.print(text, markup=False)

    def start(self, blocks: int, done: int) -> None:
        super().start(blocks, done)
        self._errors: list[float] = []
        if done:
            self.phase(f"resuming: {done} of {blocks} blocks are done already")

    def linear(self, spec: LinearSpec, solved: Solved) -> None:
        super().linear(spec, solved)
        self._errors.append(solved.error)

    def block(self, index: int, replayed: bool) -> None:
        super().block(index, replayed)
        if replayed:
            self.phase(f"block {index + 1}/{self._blocks} replayed")
            return
        error = f" error {sum(self._errors) / len(self._errors):.4f}" if self._errors else ""
        self.phase(f"block {index + 1}/{self._blocks}{error} left {self.remaining()}")
        self._errors = []

    def evaluating(self, source: str, done: int, total: int) -> None:
        if done == total:
            self.phase(f"evaluated {source}")


class Live(Lines):
    """A bar with block, linear, error, elapsed and remaining time."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[detail]}", style="dim"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}", style="cyan"),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1, detail="", left="--:--", visible=False)
        self._bar.start()

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text, visible=True, detail="")

    def start(self, blocks: int, done: int) -> None:
        super().start(blocks, done)
        self._bar.reset(self._task, total=blocks, description="block", visible=True)

    def linear(self, spec: LinearSpec, solved: Solved) -> None:
        super().linear(spec, solved)
        self._bar.update(self._task, detail=f"{spec.local} error {solved.error:.4f}")

    def block(self, index: int, replayed: bool) -> None:
        Quiet.block(self, index, replayed)
        self._bar.update(self._task, description="block", completed=index + 1, left=self.remaining())

    def evaluating(self, source: str, done: int, total: int) -> None:
        if done == 1:
            self._bar.reset(self._task, total=total, description=f"evaluating {source}", visible=True)
        self._bar.update(self._task, completed=done, detail="", left="")

    def close(self) -> None:
        self._bar.stop()


def clock(seconds: float) -> str:
    """`1:02:03` or `02:03`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


@contextmanager
def listener(quiet: bool) -> Iterator[Quiet]:
    """The listener that fits where stderr goes."""
    progress = Quiet() if quiet else Live() if sys.stderr.isatty() else Lines()
    try:
        yield progress
    finally:
        progress.close()
