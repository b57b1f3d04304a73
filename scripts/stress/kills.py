"""Stop jobs at random moments by SIGKILL, SIGTERM or SIGINT, and resume them until they end."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import forked
import stops
from stress.jobs import Method

MINUTE = 60  # seconds after which a job that was asked to stop is killed
CALLS = {  # functions that a random call is of, and the number of calls to choose from
    "os:replace": 6,
    "os:rename": 1,
    "os:fsync": 12,
    "os:unlink": 6,
    "quantkit.models.files.checkpoint:Checkpoint.read": 10,
    "quantkit.quantize.solving:Quantizer._record": 14,
    "quantkit.quantize.outputs.finish:_verify": 1,
}
COMMON = 4  # of these functions: all jobs call them


def stage(folder: Path, output: str) -> str:
    """Return how far the job had come, by the files on the disk."""
    partial = folder / f"{output}.partial"
    if (folder / output).exists():
        return "published"
    if list(partial.glob("output*")):
        return "assembling"
    if partial.is_dir():
        return "solving" if list(partial.glob("block-*.safetensors")) else "staging begun"
    return "loading"


class Killed(Method):
    """Jobs that are stopped at random moments."""

    def __init__(self, name: str, work: Path, server: forked.Server, chance: random.Random):
        super().__init__(name, work, server)
        self.chance = chance
        self.seen = {"stops": Counter(), "at": Counter(), "ends": 0}
        began = time.monotonic()
        assert server.run(self.where / "reference", stops.command(name)) == 0
        self.took = time.monotonic() - began
        self.wanted = self.contents("reference")

    def run(self, kills: int) -> None:
        folder = self.where / "job"
        while sum(self.seen["stops"].values()) < kills:
            self._until_it_ends(folder)
            self.seen["ends"] += 1
            if not (folder / self.output).exists():
                self.wrong.append("no output")
            elif self.contents() != self.wanted:
                self.wrong.append("other bytes")
            if left := stops.left(self.name, folder):
                self.wrong.append(f"left behind: {left}")
            shutil.rmtree(folder)

    def _until_it_ends(self, folder: Path) -> None:
        typed, times = stops.command(self.name), 0
        while True:
            number = self.chance.choice(list(stops.STOPS))
            code = self._once(folder, typed, number, times)
            times += 1
            if code == 0:
                return
            self.seen["stops"][number.name] += 1
            self.seen["at"][stage(folder, self.output)] += 1
            if said := stops.wrong(self.name, folder, number, code, "--overwrite" in typed):
                self.wrong.append(f"{number.name}: {said}")
                if code not in stops.STOPS[number]:
                    return
            replaces = ["--overwrite"] if (folder / self.output).exists() else []
            typed = [*stops.again(self.name), *replaces]

    def _once(self, folder: Path, typed: list[str], number: int, times: int) -> int:
        """Return its exit code. A job has longer with each stop, so that it ends."""
        if self.chance.random() < 0.4:
            called = list(CALLS)[:COMMON] if self.name in ("gguf rtn", "imatrix") else list(CALLS)
            function = self.chance.choice(called)
            moment = self.chance.randint(1, CALLS[function]) + times // 4
            return self.server.run(folder, typed, stop=(function, moment, int(number)))
        job = self.server.start(folder, typed)
        code = job.wait(self.chance.uniform(0, 1.1) * self.took * 1.1**times)
        if code is None:
            job.send(number)
            code = job.wait(MINUTE)
        if code is None:
            self.wrong.append(f"{number.name}: goes on for a minute")
            job.send(9)
            code = job.wait(MINUTE)
        return code


def kills(args: argparse.Namespace) -> int:
    share, bad = -(-args.kills // len(args.methods)), 0
    with tempfile.TemporaryDirectory() as work, forked.Server() as server:
        for name in args.methods:
            method = Killed(name, Path(work), server, random.Random(f"{args.seed} {name}"))
            method.run(share)
            bad += method.print()
    return bad
