"""Rounds over all checkpoints, A B A B…: what disturbs the machine for a while disturbs all of them."""

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
from quantkit.quantize.progress import Progress
from quantkit.serving.bench import runners
from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Job, Subject, open_subject
from quantkit.serving.engines.choose import choose_local

MODULE = "quantkit.serving.bench.worker"
LAST = 1000  # characters of what a worker that died said last


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


def rows(
    sources: Sequence[str],
    engines: str,
    settings: Settings,
    revision: str | None = None,
    offline: bool = False,
) -> list[Measured]:
    """A row for every checkpoint in every engine asked for; one that no engine runs says why.

    Raises QuantkitError for what is no checkpoint, and for an unknown engine.
    """
    asked = runners.parse(engines)
    subjects = [
        open_subject(source, revision if position == 0 else None, offline)
        for position, source in enumerate(sources)
    ]
    found = []
    for subject in subjects:
        taken: set[str] = set()  # auto is one of the others
        for name in asked:
            try:
                folders = [] if subject.container == "gguf" else [subject.source]
                engine, note = choose_local(name, folders, settings.decoded)
                if engine not in taken:
                    found.append(Measured(subject, engine, note))
                taken.add(engine)
            except QuantkitError as error:
                found.append(Measured(subject, name, error=f"{error.message} ({error.hint})"))
    return found


def measure(found: Sequence[Measured], settings: Settings, progress: Progress | None = None) -> None:
    """Fill the rows, in rounds; what fails, or runs otherwise than stored, is told at once and stays in the
    table. One that failed is not tried again."""
    progress = progress or Progress()
    total, done = settings.rounds * settings.runs * len(found), 0

    def reached(row: Measured) -> None:
        progress.counting("measuring", done, total)
        if note := row.error or (row.loaded or {}).get("note"):
            progress.warn(f"{row.subject.source}: {note}")  # shown once

    for row in found:
        if row.note:
            progress.warn(f"{row.subject.source} runs in {row.engine}: {row.note}")
    for number in range(settings.rounds):
        for row in found:
            begin = done
            reached(row)
            if not row.error:
                points = [point for point in settings.points if point not in row.refused]
                for event in events(Job(row.subject, row.engine, settings, points, rates=True)):
                    done += event["event"] == "run"
                    hear(row, event, number)
                    reached(row)
            done = begin + settings.runs  # refused points count as done
            reached(row)


def refuse_empty(result: dict[str, Any]) -> None:
    """Raise QuantkitError with the record where nothing at all could be run."""
    points = [point for model in result["models"] for point in model["points"]]
    if all(point["error"] for point in points):
        model = result["models"][0]
        why = f"{model['label']}: {model['points'][0]['error']}"
        raise QuantkitError(f"nothing ran: {why}", "the reasons stand behind 'not run'", RUNTIME, result)


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
    """What the worker of a job tells; at last how it died, if it did. It is ended whatever happens here."""
    paths = [str(Path(quantkit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(job.settings.threads)}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        pickle.dump(job, asked)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | more,
        )
        try:
            for line in process.stdout:
                if not line.endswith(b"\n"):
                    break  # it died while it wrote
                event = json.loads(line)
                yield event
                if event["event"] in ("done", "failed"):
                    return
            process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            yield {"event": "failed", "message": death(process.returncode, said), "hint": ""}
        finally:
            process.kill()
            process.communicate()


def death(code: int, said: str) -> str:
    """Why a worker ended without saying so itself."""
    lines = [line for line in printable(said).splitlines() if line.strip()]
    last = f": {lines[-1][-LAST:]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"killed by the system, which does so when memory runs out{last}"
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code}{last}"
