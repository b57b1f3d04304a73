"""Let every write of a job fail in turn, then every read: nothing may be torn, and one line must say why.

    python scripts/faults.py [--methods gptq nf4 ...] [--every 1] [--errors ENOSPC EIO] [--minutes 600]

A library between the job and the system (faults.c, compiled here: this needs `cc`) fails the n-th call below
the folder that the job writes to, or reads its model from. After each: no traceback, no output or the whole
one, and the same command with --resume ends with the bytes of an undisturbed run. Prints a line of JSON by
method; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import failing  # noqa: E402
import forked  # noqa: E402
import stops  # noqa: E402


class Method:
    """Jobs of one method behind the library."""

    def __init__(self, name: str, where: Path, server: forked.Server, library: str):
        self.name, self.where, self.server, self.library = name, where, server, library
        self.output = stops.output(name)
        assert server.learn(where / "first", stops.command(name)) == 0, (where / "first/log").read_text()
        self.calls = {}
        for kind in "wr":
            reference = where / f"reference {kind}"
            assert self._run(reference, stops.command(name), kind) == 0, forked.said(reference)
            self.calls[kind] = int((reference / "count").read_text())
        self.wanted = stops.contents(reference / self.output)
        self.codes, self.wrong = Counter(), []

    def _run(self, folder: Path, typed: list[str], kind: str = "w", number: int = 0, error: int = 0) -> int:
        folder.mkdir(exist_ok=True)
        place = folder if kind == "w" else self.where / "model"
        call = ("failing:begin", [self.library, str(place), kind, number, error])
        return self.server.run(folder, typed, call=call)

    def fail(self, kind: str, number: int, failing: str) -> None:
        """One call of a job."""
        folder, what = self.where / "job", f"{kind}{number} {failing}"
        code = self._run(folder, stops.command(self.name), kind, number, getattr(errno, failing))
        log = forked.said(folder)
        self.codes[str(code)] += 1
        if code < 0:
            self.wrong.append(f"{what}: ended by {code}")
        elif "Traceback" in log or (code and len(re.findall("^error: ", log, re.M)) != 1):
            self.wrong.append(f"{what}: exit code {code}: {log[-400:]}")
        there = (folder / self.output).exists()
        if there and stops.contents(folder / self.output) != self.wanted:
            self.wrong.append(f"{what}: exit code {code}, other bytes published")
        elif code == 0 and not there:
            self.wrong.append(f"{what}: exit code 0 and no output")
        if code:
            again = stops.again(self.name)
            after = self._run(folder, [*again, "--overwrite"] if there else again)
            if after != 0 or stops.contents(folder / self.output) != self.wanted:
                self.wrong.append(f"{what}: not resumed: {forked.said(folder)[-300:]}")
        shutil.rmtree(folder)

    def record(self) -> dict:
        return {
            "method": self.name,
            "calls": self.calls,
            "codes": dict(self.codes),
            "wrong": len(self.wrong),
            "first": self.wrong[:8],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=list(stops.METHODS), default=list(stops.METHODS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--errors", nargs="+", default=["ENOSPC", "EIO"])
    parser.add_argument("--minutes", type=float, default=10**6, help="of each method, at most")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        library = failing.build(Path(place))
        with forked.Server(LD_PRELOAD=library) as server:
            for name in args.methods:
                where = Path(place) / name.replace(" ", "-")
                where.mkdir()
                method = Method(name, stops.workplace(where), server, library)
                chance, until = random.Random(name), time.monotonic() + 60 * args.minutes
                for kind, calls in method.calls.items():
                    for number in range(1 + chance.randrange(args.every), calls + 1, args.every):
                        error = args.errors[number // args.every % len(args.errors)] if kind == "w" else "EIO"
                        if time.monotonic() < until:
                            method.fail(kind, number, error)
                print(json.dumps(method.record()), flush=True)
                bad += len(method.wrong)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
