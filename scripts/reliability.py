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
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import common
from common import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import stops  # noqa: E402
from stress.faults import faults  # noqa: E402
from stress.fuzz import fuzz  # noqa: E402
from stress.kills import kills  # noqa: E402

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
    print(time.process_time())
"""


def physical(args: argparse.Namespace) -> int:
    def run(code: str) -> list[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, stdout=-1, text=True, env=environment).stdout.split()

    held, freed = map(int, run(PEAKS))
    seconds = float(run(PLAN)[-1])
    limits = {
        f"64 MiB held are a peak of {held} MiB": 64 <= held < 80,
        f"a new peak after them is {freed} MiB": freed < 32,
        f"plan --help takes {seconds:.2f} CPU seconds": seconds < 2,
    }
    lines = "; ".join(line if sound else f"{line} (WRONG)" for line, sound in limits.items())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors: {lines}")
    return not all(limits.values())


# table

DOCUMENT = ROOT / "docs/reliability.md"


def records(part: str, rows: list[dict]) -> str:
    """Return stops by signal and by what the job was doing; or calls that failed, and how jobs ended."""

    def counts(name: str) -> Counter:
        return sum((Counter(row[name]) for row in rows), Counter())

    if part == "kills":
        stopped, at = counts("stops"), counts("at")
        signals, moments = (
            ", ".join(f"{number} {name}" for name, number in each.most_common()) for each in (stopped, at)
        )
        return f"{stopped.total()} stops of {len(rows)} kinds of jobs ({signals}), while {moments}"
    codes = counts("codes")
    ends = ", ".join(f"{number} with exit code {code}" for code, number in sorted(codes.items()))
    return f"{codes.total()} failing writes and reads of {len(rows)} kinds of jobs ({ends})"


def table_row(log: Path) -> list[str]:
    """Return a part's row."""
    text = log.read_text(errors="replace")
    wrong, seconds = map(int, log.with_suffix(".end").read_text().split())
    what = text.strip().splitlines()[-1].replace("|", "\\|")
    if rows := [json.loads(line) for line in text.splitlines() if line.startswith('{"method"')]:
        what, wrong = records(log.stem, rows), sum(row["wrong"] for row in rows)
    return [log.stem, what, str(wrong), f"{seconds / 60:.0f}"]


def table(args: argparse.Namespace) -> int:
    stored = re.findall(r"^\| (.*) \|$", DOCUMENT.read_text(), re.M)
    rows = {row.partition(" ")[0]: row.split(" | ") for row in stored if row.count(" | ") == 3}
    head, _ = rows.pop("part"), rows.pop("---", None)
    ended = sorted(args.logs.glob("*.end"))
    rows |= {path.stem: table_row(path.with_suffix(".log")) for path in ended}
    text = common.table(head, list(rows.values()), left=2)
    common.write_section("nightly", text, DOCUMENT) if args.write else print(text)
    return any(int(path.read_text().split()[0]) for path in ended)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="PART")
    for run in (kills, faults, fuzz, physical, table):
        part = parts.add_parser(run.__name__)
        part.set_defaults(run=run)
        if run in (kills, faults):
            methods = list(stops.METHODS)
            part.add_argument("--methods", nargs="+", choices=methods, default=methods)
    kill, fault, fuzzed, _, tabled = (part.add_argument for part in parts.choices.values())
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
