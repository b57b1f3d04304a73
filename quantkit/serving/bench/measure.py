"""Rounds over all checkpoints, A B A B…: what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import quantkit
from quantkit.errors import printable
from quantkit.serving.bench.job import Job
from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Subject

MODULE = "quantkit.serving.bench.worker"
LAST = 1000  # characters of what a worker that died said last
Reached = Callable[[int, int], None]  # runs done, runs in all


@dataclass
class Measured:
    """All that was heard of one checkpoint in one engine; `error` says why it does not run.

    runs: of each point, measured ones only, a list for every round. refused: points, and why.
    """

    subject: Subject
    engine: str
    note: str = ""
    error: str | None = None
    loaded: dict[str, Any] | None = None
    load_seconds: list[float] = field(default_factory=list)
    rates: dict[str, Any] | None = None
    runs: dict[Point, list[list[dict[str, Any]]]] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)


def measure(
    rows: Sequence[Measured], settings: Settings, reached: Reached = lambda done, total: None
) -> None:
    """Fill the rows, in rounds. One that failed is not tried again."""
    total, done = settings.rounds * settings.runs * len(rows), 0
    reached(done, total)
    for number in range(settings.rounds):
        for row in rows:
            begin = done
            if not row.error:
                points = [point for point in settings.points if point not in row.refused]
                job = Job(row.subject, row.engine, settings, points, rates=True)
                for event in events(job):
                    done += event["event"] == "run"
                    reached(done, total)
                    hear(row, event, number)
            done = begin + settings.runs  # refused points count as done
            reached(done, total)


def hear(row: Measured, event: dict[str, Any], number: int) -> None:
    """One event of a worker in round `number`."""
    event = dict(event)
    kind = event.pop("event")
    if kind == "loaded":
        row.load_seconds.append(event["seconds"])
        row.loaded = event
    elif kind == "rates":  # the most of all rounds: what the machine can, not what it did beside other work
        before = row.rates or event
        row.rates = event | {key: max(before[key], event[key]) for key in ("bandwidth", "flops")}
    elif kind == "failed":
        row.error = event["message"] + (f" ({event['hint']})" if event["hint"] else "")
    elif kind in ("run", "refused"):
        point = Point(event.pop("batch"), event.pop("prompt"))
        if kind == "refused":
            row.refused[point] = event["message"]
        elif not event.pop("warmup"):
            rounds = row.runs.setdefault(point, [])
            while len(rounds) <= number:
                rounds.append([])
            rounds[number].append(event)


def events(job: Job) -> Iterator[dict[str, Any]]:
    """What the worker of a job tells; at last how it died, if it did."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        _worker(job, errors) as process,
    ):
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # it died while it wrote
            event = json.loads(line)
            yield event
            if event["event"] in ("done", "failed"):
                return
        process.wait()
        errors.seek(0)
        yield {"event": "failed", "message": death(process.returncode, errors.read()), "hint": ""}


@contextmanager
def _worker(job: Job, errors: IO[str]) -> Iterator[subprocess.Popen]:
    """The running process; it is ended whatever happens here."""
    root = str(Path(quantkit.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(job.settings.threads)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    try:
        try:
            process.stdin.write(job.dump())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has died already; how, its exit code and stderr say
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def death(code: int, said: str) -> str:
    """Why a worker ended without saying so itself."""
    lines = [line for line in printable(said).splitlines() if line.strip()]
    last = f": {lines[-1][-LAST:]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"killed by the system, which does so when memory runs out{last}"
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code}{last}"
