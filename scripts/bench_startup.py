"""CPU seconds of starting up: the help, and a data-free job of a small model, against the imports they need.

    python scripts/bench_startup.py

The best of several runs of each, in turns, user and system time of the process together; only the ratios
mean something on another machine. A job's own work is what it takes the second time in one process.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "data" / "demo-llama-6m"
PYTHON, QUANTKIT = [sys.executable, "-c"], [sys.executable, "-m", "quantkit"]
HELP = {
    "python -c pass": [*PYTHON, "pass"],
    "import typer, rich": [*PYTHON, "import typer, rich"],
    "import typer.rich_utils": [*PYTHON, "import typer.rich_utils"],
    "quantkit --help": [*QUANTKIT, "--help"],
    "quantkit gptq --help": [*QUANTKIT, "gptq", "--help"],
}
LIBRARIES = "import torch, transformers, safetensors"
TWICE = """import sys, time
from quantkit.cli import main
sys.argv[0] = "quantkit"
for _ in range(2):
    start = time.process_time()
    try:
        main()
    except SystemExit as done:
        assert not done.code
print(time.process_time() - start)"""
CLASS = f"{LIBRARIES}; from transformers import LlamaForCausalLM"


def output(command: list[str]) -> str:
    """What the process prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def cpu_seconds(command: list[str]) -> float:
    """User and system time of the process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def best(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
    """The least seconds of each; the runs take turns, so that a busy minute meets all of them."""
    rounds = [{name: cpu_seconds(command) for name, command in commands.items()} for _ in range(runs)]
    return {name: min(row[name] for row in rounds) for name in commands}


def show(measured: dict[str, float], references: list[str]) -> None:
    """A line per command, with its ratio to each of the references."""
    for name, seconds in measured.items():
        ratios = "".join(f"{seconds / measured[other]:9.2f} x {other}" for other in references)
        print(f"{name:55s} {seconds:7.3f} s{ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    show(best(HELP, 2 * runs), ["python -c pass", "import typer, rich"])
    print()
    with tempfile.TemporaryDirectory() as folder:
        job = ["nf4", str(MODEL), "-o", str(Path(folder) / "out"), "--overwrite", "--json", "--quiet"]
        commands = {
            LIBRARIES: [*PYTHON, LIBRARIES],
            CLASS: [*PYTHON, CLASS],
            "quantkit nf4": [*QUANTKIT, *job],
        }
        measured = best(commands, runs)
        own = min(float(output([*PYTHON, TWICE, *job]).splitlines()[-1]) for _ in range(runs))
    show(measured, [LIBRARIES, CLASS])
    starting = (measured["quantkit nf4"] - own) / measured[CLASS]
    print(f"its own work {own:.3f} s; all the rest is {starting:.2f} times the import of the model's class")


if __name__ == "__main__":
    main()
