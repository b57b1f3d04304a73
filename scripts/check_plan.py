"""What `quantkit plan` predicts of a job against what the job takes: memory within 25 %, or exit code 1.

    python scripts/check_plan.py [--methods int8 nf4 gptq awq gguf] [--shapes 512x4x4096 …] [--samples 8]

Makes random Llamas (width x blocks x vocabulary) and quantizes each in a process of its own with default
options on one thread. Compared are the peak resident memory of the whole process with peak_memory_bytes,
what of it came on top of the imports with above_interpreter_bytes, and CPU seconds with the range given for
one core, which is for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import random_llama

TOLERANCE = 0.25
JOB = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from quantkit.quantize import job, methods, loop
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.progress import Progress

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

torch.randn(64, 64) @ torch.randn(64, 64)
method, model, out, samples, seqlen = sys.argv[1:]
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
baseline = status("VmRSS")
loop.run(job.prepare(job.Request(
    source=model, method=method, options=methods.load(method).Options(), output=Path(out),
    calibration=CalibrationOptions(samples=int(samples), seqlen=int(seqlen)), run=RunOptions(threads=1),
), Progress()), Progress())
print(baseline, status("VmHWM"), time.process_time())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["int8", "nf4", "gptq", "awq", "gguf"])
    parser.add_argument("--shapes", nargs="+", default=["512x4x4096", "512x2x65536", "1024x3x4096"])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=256)
    args = parser.parse_args()
    worst = 0.0
    for shape in args.shapes:
        width, blocks, vocabulary = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            sizes = width, width * 11 // 4 // 128 * 128, blocks, width // 64, args.seqlen
            random_llama.make(model, *sizes, "bfloat16", vocabulary=vocabulary)
            predicted = plan(model, args.samples, args.seqlen)
            for method in args.methods:
                worst = max(worst, compare(shape, method, predicted[method], model, args))
    print(f"furthest off: {100 * worst:.0f} %")
    sys.exit(worst > TOLERANCE)


def plan(model: Path, samples: int, seqlen: int) -> dict[str, dict]:
    """`job` of `quantkit plan --json`."""
    command = [sys.executable, "-m", "quantkit", "plan", str(model), "--json"]
    command += ["--samples", str(samples), "--seqlen", str(seqlen)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=_one_core)
    return json.loads(done.stdout)["job"]


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def compare(shape: str, method: str, predicted: dict, model: Path, args: argparse.Namespace) -> float:
    """Run the job, print a line, and return by how much the worse of both memory figures is off."""
    out = model.parent / method
    arguments = map(str, (method, model, out, args.samples, args.seqlen))
    command = [sys.executable, "-c", JOB, *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    baseline, peak, seconds = map(float, output.split())
    pairs = {
        "peak": (peak, predicted["peak_memory_bytes"]),
        "above": (peak - baseline, predicted["above_interpreter_bytes"]),
    }
    off = {name: expected / measured - 1 for name, (measured, expected) in pairs.items()}
    words = [
        f"{name} {measured / 2**20:.0f} MiB, predicted {expected / 2**20:.0f} ({off[name]:+.0%})"
        for name, (measured, expected) in pairs.items()
    ]
    quick, slow = predicted["seconds"]
    words.append(f"{seconds:.0f} CPU s, predicted {quick:.0f} to {slow:.0f}")
    print(f"{shape:12s} {method:5s} " + "; ".join(words), flush=True)
    return max(map(abs, off.values()))


if __name__ == "__main__":
    main()
