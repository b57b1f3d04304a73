"""Rounds over all checkpoints, A B A B…, so that a disturbance of the machine slows all of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import RUNTIME, QuantkitError, printable
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench import runners
from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Job, Subject, open_subject
from quantkit.serving.engines.choose import choose_local

MODULE = "quantkit.serving.bench.worker"
LAST_CHARACTERS = 1000  # characters of a dead worker's last line that are shown


@dataclass
class Measured:
    """The measurements of one checkpoint in one engine; `error` says why it does not run.

    loaded: the last `loaded` event, see worker.py. load_seconds, rates: one entry per round. runs: measured
    runs by point, without warm-up. refused: the reason why a point cannot run.
    """

    subject: Subject
    engine: str
    note: str = ""
    error: str | None = None
    loaded: dict[str, Any] | None = None
    load_seconds: list[float] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    runs: dict[Point, list[dict[str, Any]]] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)

    def hear(self, event: dict[str, Any]) -> None:
        """Store one event of a worker."""
        event = dict(event)
        kind = event.pop("event")
        if kind == "loaded":
            self.load_seconds.append(event["seconds"])
            self.loaded = event
        elif kind == "rates":
            self.rates.append(event)
        elif kind == "failed":
            self.error = event["message"]
        elif kind in ("run", "refused"):
            point = Point(event.pop("batch"), event.pop("prompt"))
            if kind == "refused":
                self.refused[point] = event["message"]
            elif not event.pop("warmup"):
                self.runs.setdefault(point, []).append(event)


def rows(
    sources: Sequence[str],
    settings: Settings,
    revision: str | None = None,
    offline: bool = False,
) -> list[Measured]:
    """Return one row per checkpoint and engine of --engine. `error` is set where the engine cannot run it.

    Raises QuantkitError for a source that is no checkpoint, and for an unknown engine.
    """
    requested = runners.names(settings)
    subjects = [
        open_subject(source, revision if position == 0 else None, offline)
        for position, source in enumerate(sources)
    ]
    found = []
    for subject in subjects:
        folder = None if subject.container == "gguf" else subject.source
        for name in requested:
            try:
                engine, note = choose_local(name, folder, settings.decoded)
                if all(row.subject is not subject or row.engine != engine for row in found):
                    found.append(Measured(subject, engine, note))
            except QuantkitError as error:
                found.append(Measured(subject, name, error=f"{error.message} ({error.hint})"))
    return found


def measure(found: Sequence[Measured], settings: Settings, progress: Progress = SILENT) -> None:
    """Run all checkpoints in rounds and add the results to their rows. What fails is not tried again."""
    each = len(settings.points) * (settings.warmup + settings.repeats)
    done, total = 0, settings.rounds * each * len(found)
    for turn in range(settings.rounds * len(found)):
        row = found[turn % len(found)]
        points = [] if row.error else [point for point in settings.points if point not in row.refused]
        for event in events(Job(row.subject, row.engine, settings, points)) if points else ():
            done += event["event"] == "run"
            row.hear(event)
            progress.counting("measuring", done, total)
        done = each * (turn + 1)  # refused points count as done
        for note in filter(None, (row.error, row.note, (row.loaded or {}).get("note"))):
            progress.warn(f"{row.subject.source}: {note}")  # shown once


def refuse_empty(result: dict[str, Any]) -> None:
    """Raise QuantkitError if no point ran; the error contains the record `result`."""
    points = [point for model in result["models"] for point in model["points"]]
    if all(point["error"] for point in points):
        model = result["models"][0]
        why = f"{model['label']}: {model['points'][0]['error']}"
        raise QuantkitError(f"nothing ran: {why}", "the table names every reason", RUNTIME, result)


def events(job: Job) -> Iterator[dict[str, Any]]:
    """Run a job in a worker process and yield its events; if it dies, the last event says why."""
    paths = [str(Path(quantkit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(job.settings.cores)}
    with tempfile.TemporaryFile() as requested, tempfile.TemporaryFile() as errors:
        pickle.dump(job, requested)
        requested.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=requested,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | more,
        )
        try:
            for line in process.stdout:
                if not line.endswith(b"\n"):
                    break  # the worker died while it wrote
                event = json.loads(line)
                yield event
                if event["event"] in ("done", "failed"):
                    return
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace")
            yield {"event": "failed", "message": death(process.returncode, last)}
        finally:
            process.kill()
            process.communicate()


def death(code: int, stderr: str) -> str:
    """Return why a worker died, from its exit code and the last line of its stderr."""
    lines = [line for line in printable(stderr).splitlines() if line.strip()]
    last = f": {lines[-1][-LAST_CHARACTERS:]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"killed by the system, probably because memory ran out{last}"
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code}{last}"
