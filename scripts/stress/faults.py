"""Fail the n-th write below a job's folder, then the n-th read of its model, for every n."""

from __future__ import annotations

import argparse
import errno
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import failing
import forked
import stops
from stress.jobs import Method


class Faulty(Method):
    """Jobs with the library between them and the system."""

    def __init__(self, name: str, work: Path, server: forked.Server, library: str):
        super().__init__(name, work, server)
        self.library = library
        self.seen = {"calls": {}, "codes": Counter()}
        for kind in "wr":
            reference = self.where / f"reference {kind}"
            assert self._run(reference, stops.command(name), kind) == 0, forked.said(reference)
            self.seen["calls"][kind] = int((reference / "count").read_text())
        self.wanted = self.contents("reference r")

    def _run(self, folder: Path, typed: list[str], kind: str = "w", number: int = 0, error: int = 0) -> int:
        folder.mkdir(exist_ok=True)
        below = folder if kind == "w" else self.where / "model"
        call = ("failing:begin", [self.library, str(below), kind, number, error])
        return self.server.run(folder, typed, call=call)

    def fail(self, kind: str, number: int, failing: str) -> None:
        """Let one call of a job fail, and resume the job."""
        folder, what = self.where / "job", f"{kind}{number} {failing}"
        code = self._run(folder, stops.command(self.name), kind, number, getattr(errno, failing))
        log = forked.said(folder)
        self.seen["codes"][str(code)] += 1
        if code < 0:
            self.wrong.append(f"{what}: ended by {code}")
        elif "Traceback" in log or (code and len(re.findall("^error: ", log, re.M)) != 1):
            self.wrong.append(f"{what}: exit code {code}: {log[-400:]}")
        published = (folder / self.output).exists()
        if published and self.contents() != self.wanted:
            self.wrong.append(f"{what}: exit code {code}, other bytes published")
        elif code == 0 and not published:
            self.wrong.append(f"{what}: exit code 0 and no output")
        if code:
            again = stops.again(self.name)
            after = self._run(folder, [*again, "--overwrite"] if published else again)
            if after != 0 or self.contents() != self.wanted:
                self.wrong.append(f"{what}: not resumed: {forked.said(folder)[-300:]}")
        shutil.rmtree(folder)


def faults(args: argparse.Namespace) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as work:
        library = failing.build(Path(work))
        with forked.Server(LD_PRELOAD=library) as server:
            for name in args.methods:
                method = Faulty(name, Path(work), server, library)
                chance, until = random.Random(name), time.monotonic() + 60 * args.minutes
                for kind, calls in method.seen["calls"].items():
                    for number in range(1 + chance.randrange(args.every), calls + 1, args.every):
                        error = args.errors[number // args.every % len(args.errors)] if kind == "w" else "EIO"
                        if time.monotonic() < until:
                            method.fail(kind, number, error)
                bad += method.print()
    return bad
