"""Stop jobs of every method at random moments, go on, and compare every byte: nothing may be lost or torn.

    python scripts/kills.py [--kills 1000] [--seed 0] [--methods gptq nf4 ...]

A job runs on a tiny model in a process forked from one that has torch already, is stopped by SIGKILL, SIGTERM
or SIGINT after a random time, and resumed, again and again until it ends. Each end must have the bytes of an
undisturbed run, leave nothing beside it, and every stop but SIGKILL must say one clear line and how to go on.
Prints a line of JSON by method, and the stops by what the job was at. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from random_llama import DEMO, make

SERVER = multiprocessing.get_context("forkserver")
TEXT = ["--samples", "6", "--seqlen", "32", "--batch-size", "2"]
METHODS = {
    "gptq": [*TEXT, "--group-size", "64"],
    "awq": [*TEXT, "--group-size", "64"],
    "nf4": [],
    "nf4 gptq": ["--solver", "gptq", *TEXT],
    "int8": [],
    "fp8": [],
    "fp4": TEXT,
    "w8a8": TEXT,
    "gguf": ["-t", "Q4_0", *TEXT],
    "gguf rtn": ["-t", "Q8_0", "--solver", "rtn", "--imatrix", "none"],
    "imatrix": TEXT,
}
STOPS = {  # and the exit codes: before there is anything to keep, SIGTERM simply ends a process
    signal.SIGKILL: (-9,),
    signal.SIGTERM: (143, -15),
    signal.SIGINT: (130,),
}
TIMINGS = "quantkit-timings.json"


def child(folder: str, arguments: list[str]) -> None:
    """The command line in a process of its own, its output in a file."""
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from quantkit import cli

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this runs in the background
    Path("begun").touch()
    sys.argv = ["quantkit", *arguments]
    cli.main()


def start(folder: Path, arguments: list[str]):
    (folder / "begun").unlink(missing_ok=True)
    process = SERVER.Process(target=child, args=(str(folder), arguments), daemon=True)
    process.start()
    while process.is_alive() and not (folder / "begun").exists():
        time.sleep(0.001)
    return process


def contents(place: Path) -> dict[str, bytes]:
    """Every file of an output, timings aside."""
    files = [place] if place.is_file() else [path for path in place.iterdir() if path.name != TIMINGS]
    return {path.name: path.read_bytes() for path in files}


def command(name: str, model: Path) -> tuple[list[str], str]:
    """Arguments and the name of the output."""
    method = name.partition(" ")[0]
    output = "out.gguf" if method in ("gguf", "imatrix") else "out"
    threads = [] if method == "imatrix" else ["--threads", "1"]
    return [method, str(model), "-o", output, *METHODS[name], *threads], output


def said_so(log: str, number: int) -> str | None:
    """What is wrong with the last words of a job that was stopped."""
    if "Traceback" in log:
        return "a traceback"
    lines = log.splitlines()
    word = "interrupted" if number == signal.SIGINT else "terminated"
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or not errors[0].startswith(f"error: {word}"):
        return f"no line that says {word}: {lines[-2:]}"
    return None


def stage(folder: Path, output: str) -> str:
    """What the job had got to, by what lies on the disk."""
    partial = folder / f"{output}.partial"
    if (folder / output).exists():
        return "published"
    if (partial / "output").exists():
        return "assembling"
    if partial.is_dir():
        blocks = len(list(partial.glob("block-*.safetensors")))
        return "solving" if blocks else "staging begun"
    return "loading"


def run_method(name: str, model: Path, kills: int, chance: random.Random, where: Path) -> dict:
    """Stop jobs of one method so many times."""
    arguments, output = command(name, model)
    again = [*arguments, "--resume"] if name.partition(" ")[0] != "imatrix" else arguments
    reference = where / "reference"
    reference.mkdir(parents=True)
    began = time.monotonic()
    process = start(reference, arguments)
    process.join()
    took = time.monotonic() - began
    assert process.exitcode == 0, (reference / "log").read_text()
    wanted = contents(reference / output)
    stopped, ends, wrong, at = Counter(), 0, [], Counter()
    while sum(stopped.values()) < kills:
        folder = where / f"{ends}"
        folder.mkdir()
        first = True
        while True:
            process = start(folder, arguments if first else again)
            first = False
            number = chance.choice(list(STOPS))
            process.join(chance.uniform(0, 1) * took)
            if process.is_alive():
                os.kill(process.pid, number)
                process.join(60)
                if process.is_alive():
                    wrong.append(f"{number.name}: goes on for a minute")
                    process.kill()
                    process.join()
            log = (folder / "log").read_text(errors="replace")
            if process.exitcode == 0:
                break
            stopped[number.name] += 1
            at[stage(folder, output)] += 1
            if process.exitcode not in STOPS[number]:
                wrong.append(f"{number.name}: exit code {process.exitcode}: {log[-300:]}")
                break
            if process.exitcode > 0 and (said := said_so(log, number)):
                wrong.append(f"{number.name}: {said}")
        ends += 1
        if (folder / output).exists():
            if contents(folder / output) != wanted:
                wrong.append(f"other bytes in {folder}")
            left = {path.name for path in folder.iterdir()} - {output, "log", "begun"}
            if left:
                wrong.append(f"left behind: {sorted(left)}")
        else:
            wrong.append(f"no output in {folder}")
        shutil.rmtree(folder)
    return {
        "method": name,
        "stops": dict(stopped),
        "at": dict(at),
        "ends": ends,
        "wrong": len(wrong),
        "first": wrong[:3],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    SERVER.set_forkserver_preload(["torch", "transformers", "quantkit.cli", "quantkit.quantize.loop"])
    share, bad = -(-args.kills // len(args.methods)), 0
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        make(model, 64, 128, 4, 4, 256, "bfloat16")
        assert DEMO.is_dir()
        for name in args.methods:
            where = Path(place) / name.replace(" ", "-")
            found = run_method(name, model, share, random.Random(f"{args.seed} {name}"), where)
            print(json.dumps(found), flush=True)
            bad += found["wrong"]
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
