"""Checkpoints, read from their headers, and rounds over all of them: A B A B…, each in a worker process. So a
disturbance of the machine slows all of them."""

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
from quantkit.errors import RUNTIME, QuantkitError, printable, require
from quantkit.inspection import record
from quantkit.models.files import headers, hub
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench.settings import BenchSettings, Workload
from quantkit.serving.engines.choose import choose_local

MODULE = "quantkit.serving.bench.worker"
LAST_CHARACTERS = 1000  # characters of a dead worker's last line that are shown


@dataclass(frozen=True)
class Subject:
    """A checkpoint. source: as the user named it. path: of its folder or file. size: `disk_bytes` of all
    files, `weight_bytes` and `bits_per_weight` of all tensors. context: most tokens, None if unknown."""

    source: str
    path: Path
    size: dict[str, float]
    parameters: int
    vocab_size: int
    context: int | None


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


def open_subject(source: str, revision: str | None = None, offline: bool = False) -> Subject:
    """Read the headers of a folder, a GGUF file, or a hub id (downloaded first). Raises QuantkitError."""
    path = hub.resolve(source, revision, offline)
    contents = headers.open_contents(str(path), None, True, strict=True)
    described = record.describe(contents)
    model, context = described["model"], described["positions"]["context"]
    require(model["vocab_size"], f"{source} has no vocab_size", "give a language model")
    size = {"disk_bytes": described["files"]["bytes"], "weight_bytes": model["bytes"]}
    size |= {"bits_per_weight": model["bits_per_weight"]}
    return Subject(source, path, size, model["parameters"], model["vocab_size"], context)


def open_models(
    sources: Sequence[str],
    settings: BenchSettings,
    revision: str | None = None,
    offline: bool = False,
) -> list[ModelRuns]:
    """Return a model to run for each checkpoint and engine of --engine, with an error if it cannot run there.

    Raises QuantkitError for a source that is no checkpoint.
    """
    models: list[ModelRuns] = []
    for position, source in enumerate(sources):
        subject = open_subject(source, revision if position == 0 else None, offline)
        folder, chosen = None if subject.path.is_file() else source, {}
        for name in settings.names("engine"):
            try:
                engine, note = choose_local(name, folder, settings.decoded)
                chosen.setdefault(engine, ModelRuns(subject, engine, note))
            except QuantkitError as error:
                chosen[name] = ModelRuns(subject, name, error=f"{error.message} ({error.hint})")
        models += chosen.values()
    return models


def measure(models: Sequence[ModelRuns], settings: BenchSettings, progress: Progress = SILENT) -> None:
    """Run all checkpoints in rounds and add the results to them. What fails is not tried again."""
    each = len(settings.workloads) * settings.repeats
    for turn in range(settings.rounds * len(models)):
        model, done = models[turn % len(models)], each * turn  # workloads that were refused count as done
        works = [] if model.error else [work for work in settings.workloads if work not in model.refused]
        for event in events(model.subject, model.engine, settings, works) if works else ():
            done += event["event"] == "run"
            model.add(event)
            progress.counting("measuring", done, settings.rounds * each * len(models))
        for note in filter(None, (model.error, model.note, *(loaded["note"] for loaded in model.loaded[:1]))):
            progress.warn(f"{model.subject.source}: {note}")  # shown once


def refuse_empty(result: dict[str, Any]) -> None:
    """Raise QuantkitError if no workload of a `bench` ran; the error contains the record `result`."""
    points = [point for model in result.get("models", ()) for point in model["points"]]
    if points and all(point["error"] for point in points):
        model = result["models"][0]
        why = f"{model['label']}: {model['points'][0]['error']}"
        raise QuantkitError(f"nothing ran: {why}", "the lines 'not run' name every reason", RUNTIME, result)


def events(
    subject: Subject, engine: str, settings: BenchSettings, workloads: Sequence[Workload]
) -> Iterator[dict[str, Any]]:
    """Measure workloads in a worker process and yield its events; if it dies, the last event says why."""
    paths = [str(Path(quantkit.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(settings.cores)}
    with tempfile.TemporaryFile() as pickled, tempfile.TemporaryFile() as errors:
        pickle.dump((subject, engine, settings, workloads), pickled)
        pickled.seek(0)
        command = [sys.executable, "-P", "-m", MODULE]  # -P: no modules of the current folder
        pipes = {"stdin": pickled, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, env=os.environ | variables, **pipes) as process:
            try:
                for line in process.stdout:
                    if line.endswith(b"\n"):  # else the worker died while it wrote
                        yield json.loads(line)
                if code := process.wait():
                    errors.seek(0)
                    yield {"event": "failed", "message": death(code, errors.read().decode(errors="replace"))}
            finally:
                process.kill()


def death(code: int, stderr: str) -> str:
    """Return why a worker died, from its exit code and the last line of its stderr."""
    lines = [line for line in printable(stderr).splitlines() if line.strip()]
    last = f": {lines[-1][-LAST_CHARACTERS:]}" if lines else ""
    if code == -signal.SIGKILL:
        return f"killed by the system, probably because memory ran out{last}"
    if code < 0:
        return f"its process died of {signal.Signals(-code).name}{last}"
    return f"its process ended with exit code {code}{last}"
