"""Feed damaged files of strangers to every reader: only QuantkitError may come out, in time and in memory."""

from __future__ import annotations

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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import hostile

from quantkit.errors import QuantkitError

SECONDS, MEMORY = 10, 512 << 20
HANGS = 60  # seconds after which a process is killed: code of a library does not hear the alarm
ROUND = 2000  # inputs of a process: then it ends, so that leaked memory does not pile up
DEEP = 8  # one input in eight is also printed and computed with, in ten times the time
Outcome = tuple[str, int, str | None]  # kind and number of an input, and its failure


class TooSlow(BaseException):
    """An input took longer than SECONDS."""


def fuzz(args: argparse.Namespace) -> int:
    """Try inputs until time or inputs are used up; return the number of failures."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import jsonschema  # noqa: F401 - imported once, not by every process
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    tried, failures = Counter(), Counter()
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
        rounds = [range(first, min(first + ROUND, last)) for first in range(args.first, last, ROUND)]
        context = multiprocessing.get_context("fork")  # of this process, which has imported everything
        with ProcessPoolExecutor(args.processes, context) as pool:
            for outcomes in pool.map(partial(one_round, samples, Path(place), kinds, until), rounds):
                for kind, number, failure in outcomes:
                    tried[kind] += 1
                    failures[failure] += failure is not None
                    if failure is not None and failures[failure] == 1:
                        print(f"{kind}:{number}  {failure}", flush=True)
    bad = failures.total()
    print(f"{bad} failures of {len(+failures)} kinds; inputs: {dict(sorted(tried.items()))}")
    print(f"tried {tried.total():,} inputs")
    return bad


def prepare_samples(samples: Path) -> Path:
    """Write valid files with quantkit."""
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
    """Return outcomes of a round. A process reads input after input; if it dies or hangs, another goes on."""
    source, context = random.Random(numbers.start), multiprocessing.get_context("fork")
    outcomes: list[Outcome] = []
    weights = [hostile.TARGETS[kind].often for kind in kinds]
    work = [(source.choices(kinds, weights)[0], number) for number in numbers]
    while work and time.monotonic() < until:
        ours, theirs = context.Pipe(False)
        process = context.Process(target=read_all, args=(samples, place, work, theirs))
        process.start()
        theirs.close()
        try:
            while work and ours.poll(HANGS):
                outcomes.append((*work.pop(0), ours.recv()))
        except EOFError:
            process.join()
        if work:  # the first input killed the process, or hangs
            code = process.exitcode
            failure = f"hangs for {HANGS} s" if code is None else f"ends the process: {code}"
            outcomes.append((*work.pop(0), failure))
        process.kill()
        process.join()
    return outcomes


def read_all(samples: Path, place: Path, work: list[tuple[str, int]], pipe) -> None:
    """Read all inputs in a process of its own; send the failure of each, or None."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.nice(5)
    limit_memory()
    signal.signal(signal.SIGPROF, too_slow)
    for kind, number in work:
        folder = Path(tempfile.mkdtemp(dir=place))
        pipe.send(outcome(samples, folder, kind, number))
        shutil.rmtree(folder, ignore_errors=True)


def outcome(samples: Path, place: Path, kind: str, number: int) -> str | None:
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
