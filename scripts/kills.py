"""Stop jobs of every method at random moments, go on, and compare every byte: nothing may be lost or torn.

    python scripts/kills.py [--kills 1000] [--seed 0] [--methods gptq nf4 ...]

A job runs on a tiny model in a process forked from one that has everything imported (tests/forked.py), is
stopped by SIGKILL, SIGTERM or SIGINT after a random time or just before a random call of os.replace and its
like, and resumed, again and again until it ends. Each end must have the bytes of an undisturbed run, leave
nothing beside it, and every stop but SIGKILL must say one clear line and how to go on (tests/stops.py).
Prints a line of JSON by method, and the stops by what the job was at. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forked  # noqa: E402
import stops  # noqa: E402

MINUTE = 60  # after which a job that was asked to stop does not hear
CALLS = {  # what a random call is of, and of how many
    "os:replace": 6,
    "os:rename": 1,
    "os:fsync": 12,
    "os:unlink": 6,
    "quantkit.models.files.checkpoint:Checkpoint.read": 10,
    "quantkit.quantize.solving:Solving._measured": 14,
    "quantkit.quantize.outputs.finish:_verify": 1,
}
EVERY = 4  # of these calls every job has


def stage(folder: Path, output: str) -> str:
    """What the job had got to, by what lies on the disk."""
    partial = folder / f"{output}.partial"
    if (folder / output).exists():
        return "published"
    if list(partial.glob("output*")):
        return "assembling"
    if partial.is_dir():
        blocks = len(list(partial.glob("block-*.safetensors")))
        return "solving" if blocks else "staging begun"
    return "loading"


class Method:
    """Jobs of one method, and what became of them."""

    def __init__(self, name: str, where: Path, server: forked.Server, chance: random.Random):
        self.name, self.where, self.server, self.chance = name, where, server, chance
        self.output = stops.output(name)
        self.stopped, self.at, self.wrong, self.ends = Counter(), Counter(), [], 0
        assert server.learn(where / "first", stops.command(name)) == 0, forked.said(where / "first")
        began = time.monotonic()
        assert server.run(where / "reference", stops.command(name)) == 0
        self.took = time.monotonic() - began
        self.wanted = stops.contents(where / "reference" / self.output)

    def run(self, kills: int) -> None:
        while sum(self.stopped.values()) < kills:
            folder = self.where / "job"
            self._until_it_ends(folder)
            self.ends += 1
            if not (folder / self.output).exists():
                self.wrong.append("no output")
            elif stops.contents(folder / self.output) != self.wanted:
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
            self.stopped[number.name] += 1
            self.at[stage(folder, self.output)] += 1
            if said := stops.wrong(self.name, folder, number, code, "--overwrite" in typed):
                self.wrong.append(f"{number.name}: {said}")
                if code not in stops.STOPS[number]:
                    return
            if (folder / self.output).exists():  # what is left goes with a run that may replace it
                typed = [*stops.again(self.name), "--overwrite"]
            else:
                typed = stops.again(self.name)

    def _once(self, folder: Path, typed: list[str], number: int, times: int) -> int:
        """Its exit code. With each time a job has longer, so that it ends."""
        if self.chance.random() < 0.4:
            met = list(CALLS)[:EVERY] if self.name in ("gguf rtn", "imatrix") else list(CALLS)
            place = self.chance.choice(met)
            return self.server.run(
                folder, typed, stop=(place, self.chance.randint(1, CALLS[place]) + times // 4, int(number))
            )
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

    def record(self) -> dict:
        return {
            "method": self.name,
            "stops": dict(self.stopped),
            "at": dict(self.at),
            "ends": self.ends,
            "wrong": len(self.wrong),
            "first": self.wrong[:8],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=list(stops.METHODS), default=list(stops.METHODS))
    args = parser.parse_args()
    share, bad = -(-args.kills // len(args.methods)), 0
    with tempfile.TemporaryDirectory() as place, forked.Server() as server:
        for name in args.methods:
            where = Path(place) / name.replace(" ", "-")
            where.mkdir()
            method = Method(name, stops.workplace(where), server, random.Random(f"{args.seed} {name}"))
            method.run(share)
            print(json.dumps(method.record()), flush=True)
            bad += len(method.wrong)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
