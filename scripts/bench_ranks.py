"""Two processes of one thread against one process of two.

    python scripts/bench_ranks.py [--hidden 768 --intermediate 2048 --layers 3 --samples 64 --seqlen 512]

Makes a random Llama and quantizes it both ways, in turn, in the same minutes, so that what else the machine
does hits both; the ratio is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import random_llama


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("hidden", 768), ("intermediate", 2048), ("layers", 3), ("heads", 12),
        ("samples", 64), ("seqlen", 512), ("repeat", 2),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", nargs="+", default=["gptq"])
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """Seconds of both, in turn."""
    with tempfile.TemporaryDirectory() as top:
        model, folder = Path(top) / "model", Path(top)
        shape = (args.hidden, args.intermediate, args.layers, args.heads, args.seqlen, "bfloat16")
        random_llama.make(model, *shape)
        job = [*args.method, str(model), "--samples", str(args.samples), "--seqlen", str(args.seqlen), "-q"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quantkit"]
        ways = {
            "one process of two threads": [sys.executable, "-m", "quantkit", *job, "--threads", "2"],
            "two processes of one thread": [*torchrun, *job, "--threads", "1"],
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(args.repeat):
            for number, (name, command) in enumerate(ways.items()):
                out = folder / f"out-{turn}-{number}"
                found[name].append(timed([*command, "-o", str(out)], out))
        for name, runs in found.items():
            best = min(runs, key=lambda run: run["job"])
            stages = ", ".join(f"{stage} {value:.1f}" for stage, value in best.items() if value >= 0.05)
            print(f"{name}: {stages} s")
        one, two = (min(run["job"] for run in runs) for runs in found.values())
        print(f"two processes take {two / one:.2f} of the time of one (best of {args.repeat} each)")


def timed(command: list[str], out: Path) -> dict[str, float]:
    """Wall seconds of the whole command, of the job in it, and of its stages."""
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    whole = time.perf_counter() - start
    seconds = json.loads((out / "quantkit-timings.json").read_text())["seconds"]
    return {"command": whole, "job": sum(seconds.values())} | seconds


if __name__ == "__main__":
    measure(parse())
