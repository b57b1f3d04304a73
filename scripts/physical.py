"""Measure what differs between machines, with wide limits: resident memory and CPU time.

    python scripts/physical.py

Tests assert counts alone; this part of scripts/nightly names the machine that it ran on. Exit code 1 where a
measurement is outside its limits.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
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


def run(code: str) -> subprocess.CompletedProcess:
    """The finished interpreter that ran a piece of code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )


def main() -> None:
    """Print the machine, then each measurement."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    held, freed = map(int, run(PEAKS).stdout.split())
    seconds = float(run(PLAN).stderr.split()[-1])
    limits = {
        f"64 MiB held are a peak of {held} MiB": 64 <= held < 80,
        f"a new peak after them is {freed} MiB": freed < 32,
        f"plan --help takes {seconds:.2f} CPU seconds": seconds < 2,
    }
    told = "; ".join(what if sound else f"{what} (WRONG)" for what, sound in limits.items())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors: {told}")
    sys.exit(not all(limits.values()))


if __name__ == "__main__":
    main()
