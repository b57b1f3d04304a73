"""Try to break jobs and readers for hours: kills, faults of the disk, input of strangers.

    python scripts/reliability.py kills [--kills 1000] [--seed 0] [--methods gptq nf4 ...]
    python scripts/reliability.py faults [--every 1] [--errors ENOSPC EIO] [--minutes 600] [--methods ...]
    python scripts/reliability.py fuzz [--minutes 60] [--processes 2] [--inputs N] [--only gguf,config]
    python scripts/reliability.py fuzz --again config:1234      (one input, with its traceback)
    python scripts/reliability.py physical
    python scripts/reliability.py table LOGS [--write]

kills: a job on a tiny model runs in a process forked from one that has everything imported (tests/forked.py).
    It is stopped by SIGKILL, SIGTERM or SIGINT after a random time or before a random call of os.replace and
    others, and resumed, until it ends. Each end must have the bytes of an undisturbed run and leave no other
    file, and every stop but SIGKILL must say one clear line and how to go on (tests/stops.py).
faults: a library between the job and the system (faults.c, compiled here: this needs `cc`) fails the n-th
    write below the job's folder, then the n-th read of its model. No traceback may appear, no torn output,
    and --resume must end with the bytes of an undisturbed run.
fuzz: inputs of tests/hostile.py, one for each number. Only QuantkitError may come out, within 10 seconds and
    512 MB above the interpreter with its libraries. Each kind of failure is printed once, with a number that
    makes it again; these belong into the table of tests/test_fuzz.py.
physical: resident memory and CPU time, which differ between machines. Tests assert counts alone.
table: the table of docs/reliability.md from the logs of scripts/nightly; other rows stay as they are.

kills and faults print a line of JSON for each method. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from common import ROOT, write_section

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import failing  # noqa: E402
import forked  # noqa: E402
import stops  # noqa: E402


class Method:
    """Jobs of one method: the bytes of an undisturbed run, what was seen, and what was wrong."""

    def __init__(self, name: str, place: Path, server: forked.Server):
        self.name, self.server, self.output = name, server, stops.output(name)
        self.where = place / name.replace(" ", "-")
        self.where.mkdir()
        stops.workplace(self.where)
        self.seen, self.wrong = {}, []
        assert server.learn(self.where / "first", stops.command(name)) == 0, forked.said(self.where / "first")

    def contents(self, folder: str = "job") -> dict[str, bytes]:
        return stops.contents(self.where / folder / self.output)

    def print(self) -> int:
        """Print the record; return how many runs were wrong."""
        seen = {
            name: dict(found) if isinstance(found, Counter) else found for name, found in self.seen.items()
        }
        record = {"method": self.name, **seen, "wrong": len(self.wrong), "first": self.wrong[:8]}
        print(json.dumps(record), flush=True)
        return len(self.wrong)


# kills

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
        return "solving" if list(partial.glob("block-*.safetensors")) else "staging begun"
    return "loading"


class Killed(Method):
    """Jobs that are stopped at random moments."""

    def __init__(self, name: str, place: Path, server: forked.Server, chance: random.Random):
        super().__init__(name, place, server)
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
            # what is left goes with a run that may replace it
            more = ["--overwrite"] if (folder / self.output).exists() else []
            typed = [*stops.again(self.name), *more]

    def _once(self, folder: Path, typed: list[str], number: int, times: int) -> int:
        """Its exit code. With each time a job has longer, so that it ends."""
        if self.chance.random() < 0.4:
            met = list(CALLS)[:EVERY] if self.name in ("gguf rtn", "imatrix") else list(CALLS)
            place = self.chance.choice(met)
            moment = self.chance.randint(1, CALLS[place]) + times // 4
            return self.server.run(folder, typed, stop=(place, moment, int(number)))
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
    with tempfile.TemporaryDirectory() as place, forked.Server() as server:
        for name in args.methods:
            method = Killed(name, Path(place), server, random.Random(f"{args.seed} {name}"))
            method.run(share)
            bad += method.print()
    return bad


# faults


class Faulty(Method):
    """Jobs behind the library."""

    def __init__(self, name: str, place: Path, server: forked.Server, library: str):
        super().__init__(name, place, server)
        self.library = library
        self.seen = {"calls": {}, "codes": Counter()}
        for kind in "wr":
            reference = self.where / f"reference {kind}"
            assert self._run(reference, stops.command(name), kind) == 0, forked.said(reference)
            self.seen["calls"][kind] = int((reference / "count").read_text())
        self.wanted = self.contents("reference r")

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
        self.seen["codes"][str(code)] += 1
        if code < 0:
            self.wrong.append(f"{what}: ended by {code}")
        elif "Traceback" in log or (code and len(re.findall("^error: ", log, re.M)) != 1):
            self.wrong.append(f"{what}: exit code {code}: {log[-400:]}")
        there = (folder / self.output).exists()
        if there and self.contents() != self.wanted:
            self.wrong.append(f"{what}: exit code {code}, other bytes published")
        elif code == 0 and not there:
            self.wrong.append(f"{what}: exit code 0 and no output")
        if code:
            again = stops.again(self.name)
            after = self._run(folder, [*again, "--overwrite"] if there else again)
            if after != 0 or self.contents() != self.wanted:
                self.wrong.append(f"{what}: not resumed: {forked.said(folder)[-300:]}")
        shutil.rmtree(folder)


def faults(args: argparse.Namespace) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        library = failing.build(Path(place))
        with forked.Server(LD_PRELOAD=library) as server:
            for name in args.methods:
                method = Faulty(name, Path(place), server, library)
                chance, until = random.Random(name), time.monotonic() + 60 * args.minutes
                for kind, calls in method.seen["calls"].items():
                    for number in range(1 + chance.randrange(args.every), calls + 1, args.every):
                        error = args.errors[number // args.every % len(args.errors)] if kind == "w" else "EIO"
                        if time.monotonic() < until:
                            method.fail(kind, number, error)
                bad += method.print()
    return bad


# fuzz

SECONDS, MEMORY = 10, 512 << 20
HANGS = 60  # seconds after which a process is ended from outside: code of a library does not hear the alarm
ROUND = 2000  # inputs of a process, which then ends: no memory that was lost piles up
DEEP = 8  # one input in so many is also printed and computed with, which takes ten times as long
Outcome = tuple[str, int, str | None]  # kind and number of an input, and what came out of it


class TooSlow(BaseException):
    """Took longer than SECONDS."""


def fuzz(args: argparse.Namespace) -> int:
    """Rounds of processes until time or inputs are used up."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import hostile
    import jsonschema  # noqa: F401 - imported once, not by every process
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    tried, found = Counter(), Counter()
    with tempfile.TemporaryDirectory(prefix="quantkit-fuzz-", ignore_cleanup_errors=True) as place:
        samples = prepare_samples(Path(place) / "samples")
        if args.again:
            kind, number = args.again.split(":")
            limit_memory()
            hostile.TARGETS[kind].run(samples, Path(place), int(number), deep=int(number) % DEEP == 0)
            return 0
        kinds = args.only.split(",") if args.only else list(hostile.TARGETS)
        until = time.monotonic() + 60 * args.minutes
        last = args.first + args.inputs
        rounds = [range(one, min(one + ROUND, last)) for one in range(args.first, last, ROUND)]
        context = multiprocessing.get_context("fork")  # of a process that has imported everything
        with ProcessPoolExecutor(args.processes, context) as pool:
            for outcomes in pool.map(partial(one_round, samples, Path(place), kinds, until), rounds):
                for kind, number, said in outcomes:
                    tried[kind] += 1
                    found[said] += said is not None
                    if said is not None and found[said] == 1:
                        print(f"{kind}:{number}  {said}", flush=True)
    bad = found.total()
    print(f"{bad} failures of {len(+found)} kinds; inputs: {dict(sorted(tried.items()))}")
    print(f"tried {tried.total():,} inputs")
    return bad


def prepare_samples(samples: Path) -> Path:
    """The valid files, made by quantkit itself."""
    import hostile

    from quantkit import cli

    samples.mkdir()

    def command(*typed: str) -> int:
        out = "result.json" if typed[0] == "eval" else os.devnull
        sys.argv = ["quantkit", *typed]
        try:
            with contextlib.chdir(samples), open(out, "w") as file, contextlib.redirect_stdout(file):
                cli.main()
        except SystemExit as ended:
            return ended.code or 0
        return 0

    return hostile.prepare(samples, command)


def one_round(samples: Path, place: Path, kinds: list[str], until: float, numbers: range) -> list[Outcome]:
    """The outcomes of a round's inputs, each read by a process that goes on until it dies or hangs."""
    import hostile

    source, context, found = random.Random(numbers.start), multiprocessing.get_context("fork"), []
    weights = [hostile.TARGETS[kind].often for kind in kinds]
    work = [(source.choices(kinds, weights)[0], number) for number in numbers]
    while work and time.monotonic() < until:
        ours, theirs = context.Pipe(False)
        process = context.Process(target=read_all, args=(samples, place, work, theirs))
        process.start()
        theirs.close()
        try:
            while work and ours.poll(HANGS):
                said = ours.recv()
                found.append((*work.pop(0), said))
        except EOFError:
            process.join()
        if work:  # the first of them killed the process, or hangs
            code = process.exitcode
            said = f"hangs for {HANGS} s" if code is None else f"ends the process: {code}"
            found.append((*work.pop(0), said))
        process.kill()
        process.join()
    return found


def read_all(samples: Path, place: Path, work: list[tuple[str, int]], pipe) -> None:
    """The process: says of each input None, or in a line what came out."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.nice(5)
    limit_memory()
    signal.signal(signal.SIGPROF, too_slow)
    for kind, number in work:
        one = Path(tempfile.mkdtemp(dir=place))
        pipe.send(outcome(samples, one, kind, number))
        shutil.rmtree(one, ignore_errors=True)


def outcome(samples: Path, place: Path, kind: str, number: int) -> str | None:
    import hostile

    from quantkit.errors import QuantkitError

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of processor time: others may be at work, too
    try:
        hostile.TARGETS[kind].run(samples, place, number, deep=number % DEEP == 0)
    except QuantkitError as error:
        if len(error.message) > 20_000:
            return f"a message of {len(error.message)} characters"
    except BaseException as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return f"{type(error).__name__}: {str(error)[:100]!r} at {where(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def where(error: BaseException) -> str:
    """The innermost line of quantkit in a traceback, and the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/quantkit/" in frame.filename]
    named = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own[-1:] + frames[-1:])]
    return " in ".join(dict.fromkeys(named))


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def too_slow(*_) -> None:
    raise TooSlow(f"longer than {SECONDS} s")


# physical

PEAKS = """
from quantkit.serving.bench.memory import RESET, Meter
meter = Meter()
held = b"x" * (64 << 20)
print(meter.peak() >> 20)
del held
meter.reset()
print(meter.peak() >> 20 if RESET.exists() else 0)
"""
PLAN = """
import sys, time
sys.argv = ["quantkit", "plan", "--help"]
from quantkit import cli
try:
    cli.main()
except SystemExit:
    print(time.process_time(), file=sys.stderr)
"""


def physical(args: argparse.Namespace) -> int:
    def run(code: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment)

    held, freed = map(int, run(PEAKS).stdout.split())
    seconds = float(run(PLAN).stderr.split()[-1])
    limits = {
        f"64 MiB held are a peak of {held} MiB": 64 <= held < 80,
        f"a new peak after them is {freed} MiB": freed < 32,
        f"plan --help takes {seconds:.2f} CPU seconds": seconds < 2,
    }
    told = "; ".join(what if sound else f"{what} (WRONG)" for what, sound in limits.items())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors: {told}")
    return not all(limits.values())


# table

DOCUMENT = ROOT / "docs/reliability.md"
HEAD = "| part | what was tried | wrong | minutes |\n| --- | --- | ---: | ---: |\n"


def summed(rows: list[dict], name: str) -> Counter:
    return sum((Counter(row[name]) for row in rows), Counter())


def of_records(part: str, rows: list[dict]) -> str:
    """Stops by signal and by what the job was at; or calls that failed, and how jobs ended."""
    if part == "kills":
        stopped, at = (summed(rows, name).most_common() for name in ("stops", "at"))
        told = ", ".join(f"{number} {name}" for name, number in stopped)
        when = ", ".join(f"{number} {name}" for name, number in at)
        return f"{sum(dict(stopped).values())} stops of {len(rows)} kinds of jobs ({told}), while {when}"
    codes = summed(rows, "codes")
    told = ", ".join(f"{number} with exit code {code}" for code, number in sorted(codes.items()))
    return f"{codes.total()} failing writes and reads of {len(rows)} kinds of jobs ({told})"


def table_row(log: Path) -> str:
    """A part's row."""
    text = log.read_text(errors="replace")
    code, seconds = map(int, log.with_suffix(".end").read_text().split())
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"method"')]
    if found:
        told, wrong = of_records(log.stem, found), sum(row["wrong"] for row in found)
    else:
        told, wrong = text.strip().splitlines()[-1].replace("|", "\\|"), code
    return f"| {log.stem} | {told} | {wrong} | {seconds / 60:.0f} |\n"


def table(args: argparse.Namespace) -> int:
    before = {found[1]: found[0] for found in re.finditer(r"\| (\w+) \|.*\n", DOCUMENT.read_text())}
    ended = sorted(args.logs.glob("*.end"))
    rows = before | {path.stem: table_row(path.with_suffix(".log")) for path in ended}
    rows.pop("part", None)
    text = HEAD + "".join(rows.values())
    write_section("nightly", text, DOCUMENT) if args.write else print(text)
    return any(int(path.read_text().split()[0]) for path in ended)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="PART")

    def flags() -> Iterator:
        for run in (kills, faults, fuzz, physical, table):
            part = parts.add_parser(run.__name__)
            part.set_defaults(run=run)
            if run in (kills, faults):
                methods = list(stops.METHODS)
                part.add_argument("--methods", nargs="+", choices=methods, default=methods)
            yield part.add_argument

    kill, fault, fuzzed, _, tabled = flags()
    kill("--kills", type=int, default=1000)
    kill("--seed", type=int, default=0)
    fault("--every", type=int, default=1)
    fault("--errors", nargs="+", default=["ENOSPC", "EIO"])
    fault("--minutes", type=float, default=10**6, help="of each method, at most")
    fuzzed("--inputs", type=int, default=10**7, help="stop after so many")
    fuzzed("--minutes", type=float, default=10)
    fuzzed("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    fuzzed("--only", help="kinds of inputs, separated by commas: those of tests/hostile.py")
    fuzzed("--first", type=int, default=0, help="number of the first input")
    fuzzed("--again", metavar="KIND:NUMBER", help="one input, with its traceback")
    tabled("logs", type=Path)
    tabled("--write", action="store_true")
    args = parser.parse_args()
    sys.exit(bool(args.run(args)))


if __name__ == "__main__":
    main()
