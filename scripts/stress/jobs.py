"""Jobs of one method, of which every run must end with the bytes of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import stops


class Method:
    """Jobs of one method: the bytes of an undisturbed run, what was seen, and what was wrong."""

    def __init__(self, name: str, work: Path, server: forked.Server):
        self.name, self.server, self.output = name, server, stops.output(name)
        self.where = work / name.replace(" ", "-")
        self.where.mkdir()
        stops.workplace(self.where)
        self.seen, self.wrong = {}, []
        assert server.learn(self.where / "first", stops.command(name)) == 0, forked.said(self.where / "first")

    def contents(self, folder: str = "job") -> dict[str, bytes]:
        return stops.contents(self.where / folder / self.output)

    def print(self) -> int:
        """Print the record; return how many runs were wrong."""
        record = {"method": self.name, **self.seen, "wrong": len(self.wrong), "first": self.wrong[:8]}
        print(json.dumps(record), flush=True)
        return len(self.wrong)
