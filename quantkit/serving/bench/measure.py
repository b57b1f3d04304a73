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
from quantkit.serving.bench.settings import BenchSettings, Workload
from quantkit.serving.bench.subjects import Subject, open_subject
from quantkit.serving.engines.choose import choose_local

MODULE = "quantkit.serving.bench.worker"
LAST_CHARACTERS = 1000  # characters of a dead worker's last line that are shown


@dataclass
class ModelRuns:
    """The measurements of one checkpoint in one engine; `error` says why it does not run.

    loaded: this event of worker.py, one per round. runs: measured runs by workload. refused: the
    reason why a workload cannot run.
    """

    subject: Subject
    engine: str
    note: str = ""
    error: str | None = None
    loaded: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[Workload, list[dict[str, Any]]] = field(default_factory=dict)
    refused: dict[Workload, str] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """Store one event of a worker."""
        match event["event"]:
            case "loaded":
                self.loaded.append(event)
            case "failed":
                self.error = event["message"]
            case "refused":
                self.refused[Workload(event["batch"], event["prompt"])] = event["message"]
            case "run":
                self.runs.setdefault(Workload(event["batch"], event["prompt"]), []).append(event)


def rows(
    sources: Sequence[str],
    settings: BenchSettings,
    revision: str | None = None,
    offline: bool = False,
) -> list[ModelRuns]:
    """Return one row per checkpoint and engine of --engine. `error` is set where the engine cannot run it.

    Raises QuantkitError for a source that is no checkpoint, and for an unknown engine.
    """
    engines = settings.engines
    subjects = [
        open_subject(source, revision if position == 0 else None, offline)
        for position, source in enumerate(sources)
    ]
    made: list[ModelRuns] = []
    for subject in subjects:
        folder = None if subject.container == "gguf" else subject.source
        for name in engines:
            try:
                engine, note = choose_local(name, folder, settings.decoded)
                if all(row.subject is not subject or row.engine != engine for row in made):
                    made.append(ModelRuns(subject, engine, note))
            except QuantkitError as error:
                made.append(ModelRuns(subject, name, error=f"{error.message} ({error.hint})"))
    return made


def measure(rows: Sequence[ModelRuns], settings: BenchSettings, progress: Progress = SILENT) -> None:
    """Run all checkpoints in rounds and add the results to their rows. What fails is not tried again."""
    each = len(settings.workloads) * (settings.warmup + settings.repeats)
    done, total = 0, settings.rounds * each * len(rows)
    for turn in range(settings.rounds * len(rows)):
        row = rows[turn % len(rows)]
        works = [] if row.error else [work for work in settings.workloads if work not in row.refused]
        for event in events(row.subject, row.engine, settings, works) if works else ():
            done += event["event"] in ("run", "warmed up")
            row.add(event)
            progress.counting("measuring", done, total)
        done = each * (turn + 1)  # refused workloads count as done
        for note in filter(None, (row.error, row.note, *(loaded["note"] for loaded in row.loaded[:1]))):
            progress.warn(f"{row.subject.source}: {note}")  # shown once


def refuse_empty(result: dict[str, Any]) -> None:
    """Raise QuantkitError if no workload ran; the error contains the record `result`."""
    points = [point for model in result["models"] for point in model["points"]]
    if all(point["error"] for point in points):
        model = result["models"][0]
        why = f"{model['label']}: {model['points'][0]['error']}"
        raise QuantkitError(f"nothing ran: {why}", "the table names every reason", RUNTIME, result)


def events(
    subject: Subject, engine: str, settings: BenchSettings, workloads: Sequence[Workload]
) -> Iterator[dict[str, Any]]:
    """Measure workloads in a worker process and yield its events; if it dies, the last event says why."""
    paths = [str(Path(quantkit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(settings.cores)}
    with tempfile.TemporaryFile() as pickled, tempfile.TemporaryFile() as errors:
        pickle.dump((subject, engine, settings, workloads), pickled)
        pickled.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=pickled,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | variables,
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
            message = death(process.returncode, errors.read().decode(errors="replace"))
            yield {"event": "failed", "message": message}
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
