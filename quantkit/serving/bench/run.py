"""A benchmark from what the user typed to its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from quantkit.errors import RUNTIME, QuantkitError
from quantkit.serving.bench import measure as rounds
from quantkit.serving.bench import runners
from quantkit.serving.bench.columns import failures
from quantkit.serving.bench.measure import Measured
from quantkit.serving.bench.record import record
from quantkit.serving.bench.settings import Settings
from quantkit.serving.bench.subjects import open_subject
from quantkit.serving.engines.choose import choose_local

__all__ = ["measure", "record", "refuse_empty", "rows"]
WORK = "measuring"


class Listener(Protocol):
    """Whoever shows how far it is."""

    def counting(self, what: str, done: int, total: int) -> None:
        """`done` of `total` are done."""

    def warn(self, text: str) -> None:
        """Something to know."""


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
                engine, note = choose_local(name, folders, settings.decoded, program=True)
                if engine not in taken:
                    found.append(Measured(subject, engine, note))
                taken.add(engine)
            except QuantkitError as error:
                found.append(Measured(subject, name, error=f"{error.message} ({error.hint})"))
    return found


def measure(found: Sequence[Measured], settings: Settings, progress: Listener) -> None:
    """Fill the rows; what fails, or runs otherwise than stored, is told at once and stays in the table."""

    def reached(done: int, total: int) -> None:
        progress.counting(WORK, done, total)
        for row in found:  # a warning is shown once
            if note := row.error or (row.loaded or {}).get("note"):
                progress.warn(f"{row.subject.source}: {note}")

    rounds.measure(found, settings, reached)


def refuse_empty(result: dict[str, Any]) -> None:
    """Raise QuantkitError with the record where nothing at all could be run."""
    if any(point["error"] is None for model in result["models"] for point in model["points"]):
        return
    why = failures(result)
    raise QuantkitError(f"nothing ran: {why[0]}", "the reasons stand behind 'not run'", RUNTIME, result)
