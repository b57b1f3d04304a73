"""What a worker is told, as it travels through a pipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantkit.serving.bench.settings import Point, Settings
from quantkit.serving.bench.subjects import Subject


@dataclass(frozen=True)
class Job:
    """One checkpoint in one engine, one round. rates: the machine's are measured, too."""

    subject: Subject
    engine: str
    settings: Settings
    points: Sequence[Point]
    rates: bool = False

    def only(self, points: Sequence[Point]) -> Job:
        """The same with fewer points."""
        return replace(self, points=tuple(points))

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(
            asdict(self) | {"subject": {**asdict(self.subject), "path": str(self.subject.path)}}
        )

    @staticmethod
    def load(text: str) -> Job:
        """What `dump` wrote."""
        told = json.loads(text)
        settings = told["settings"]
        for name in ("batches", "prompts"):
            settings[name] = tuple(settings[name])
        return Job(
            subject=Subject(**{**told["subject"], "path": Path(told["subject"]["path"])}),
            engine=told["engine"],
            settings=Settings(**settings),
            points=tuple(Point(**point) for point in told["points"]),
            rates=told["rates"],
        )
