"""Read changed files of every kind that strangers write, for as long as there is time.

    python scripts/fuzz.py --minutes 60 --processes 2
    python scripts/fuzz.py --inputs 1000000 --only gguf,config
    python scripts/fuzz.py --again config:1234          (one input, with the traceback of what it raises)

What is read is made by tests/hostile.py, an input for each number. Nothing but QuantkitError may come out,
within 10 seconds and 512 MB above the interpreter with its libraries. Each failure is printed with the number
that makes it again, one of each kind; those belong into the table of tests/test_fuzz.py. One input in
eight is not only parsed but printed and computed with. The last line says how many inputs were tried.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import hostile  # noqa: E402
import jsonschema  # noqa: E402, F401 - imported once, not by every process
import matplotlib.pyplot  # noqa: E402, F401
import pyarrow.parquet  # noqa: E402, F401

SECONDS, MEMORY = 10, 512 << 20
HANGS = 60  # seconds after which a process is ended from outside: code of a library does not hear the alarm
ROUND = 2000  # inputs of a process, which then ends: no memory that was lost piles up
DEEP = 8  # one input in so many is also printed and computed with, which takes ten times as long


class TooSlow(BaseException):
    """Took longer than SECONDS."""


def main() -> None:
    arguments = parse()
    place = Path(tempfile.mkdtemp(prefix="quantkit-fuzz-"))
    try:
        samples = prepare(place / "samples")
        if arguments.again:
            kind, number = arguments.again.split(":")
            again(samples, place, kind, int(number))
        else:
            fuzz(arguments, samples, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", help="kinds of inputs: " + ", ".join(hostile.TARGETS))
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--again", metavar="KIND:NUMBER", help="one input, with its traceback")
    return parser.parse_args()


def prepare(samples: Path) -> Path:
    """The valid files, made by quantkit itself."""
    from quantkit import cli

    samples.mkdir()

    def command(*typed: str) -> int:
        before, out = os.getcwd(), "result.json" if typed[0] == "eval" else os.devnull
        os.chdir(samples)
        sys.argv = ["quantkit", *typed]
        try:
            with open(out, "w") as file, contextlib.redirect_stdout(file):
                cli.main()
        except SystemExit as ended:
            return ended.code or 0
        finally:
            os.chdir(before)
        return 0

    return hostile.prepare(samples, command)


def again(samples: Path, place: Path, kind: str, number: int) -> None:
    one = place / "one"
    one.mkdir()
    limit()
    hostile.TARGETS[kind].run(samples, one, number, deep=number % DEEP == 0)


def fuzz(arguments: argparse.Namespace, samples: Path, place: Path) -> None:
    """Rounds of processes until time or inputs are used up."""
    kinds = arguments.only.split(",") if arguments.only else list(hostile.TARGETS)
    weights = [hostile.TARGETS[kind].often for kind in kinds]
    deadline = time.monotonic() + 60 * arguments.minutes
    tried, found, number, working = Counter(), Counter(), arguments.first, []
    last = arguments.first + arguments.inputs
    context = multiprocessing.get_context("fork")  # of a process that has imported everything
    while working or (number < last and time.monotonic() < deadline):
        while len(working) < arguments.processes and number < last and time.monotonic() < deadline:
            source = random.Random(number)
            work = [
                (source.choices(kinds, weights)[0], one) for one in range(number, min(number + ROUND, last))
            ]
            number += len(work)
            working.append(start(context, samples, place, work))
        time.sleep(0.2)
        for one in list(working):
            outcomes = one.outcomes()
            for kind, at, said in outcomes:
                tried[kind] += 1
                tell(found, kind, at, said)
            if one.over(outcomes):
                working.remove(one)
                left = one.left()
                if left:
                    working.append(start(context, samples, place, left))
    print(f"{sum(found.values())} failures of {len(found)} kinds; inputs: {dict(sorted(tried.items()))}")
    print(f"tried {sum(tried.values()):,} inputs")


def tell(found: Counter, kind: str, at: int, said: str | None) -> None:
    if said is None:
        return
    found[said] += 1
    if found[said] == 1:
        print(f"{kind}:{at}  {said}", flush=True)


class Working:
    """A process, and which of its inputs are done."""

    def __init__(self, process, pipe, work):
        self.process, self.pipe, self.work = process, pipe, work
        self.done, self.heard = 0, time.monotonic()
        self.died = False

    def outcomes(self) -> list[tuple[str, int, str | None]]:
        """What was heard of since."""
        found, ended = [], False
        try:
            while self.pipe.poll():
                said = self.pipe.recv()
                found.append((*self.work[self.done], said))
                self.done += 1
                self.heard = time.monotonic()
        except (EOFError, OSError):
            ended = True
            self.process.join()
        hangs = not ended and time.monotonic() - self.heard > HANGS
        if hangs:
            self.process.kill()
            self.process.join()
        if (hangs or ended) and self.done < len(self.work):
            self.died = True
            said = f"hangs for {HANGS} s" if hangs else f"ends the process: {self.process.exitcode}"
            found.append((*self.work[self.done], said))
            self.done += 1
        return found

    def over(self, outcomes: list) -> bool:
        return self.died or (self.done == len(self.work) and not self.process.is_alive())

    def left(self) -> list:
        return self.work[self.done :]


def start(context, samples: Path, place: Path, work: list) -> Working:
    ours, theirs = context.Pipe(False)
    process = context.Process(target=read_all, args=(samples, place, work, theirs))
    process.start()
    theirs.close()
    return Working(process, ours, work)


def read_all(samples: Path, place: Path, work: list, pipe) -> None:
    """The process: says of each input None, or in a line what came out."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.nice(5)
    limit()
    signal.signal(signal.SIGPROF, too_slow)
    for kind, number in work:
        one = Path(tempfile.mkdtemp(dir=place))
        pipe.send(outcome(samples, one, kind, number))
        shutil.rmtree(one, ignore_errors=True)


def outcome(samples: Path, place: Path, kind: str, number: int) -> str | None:
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


def limit() -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def too_slow(*_) -> None:
    raise TooSlow(f"longer than {SECONDS} s")


if __name__ == "__main__":
    main()
