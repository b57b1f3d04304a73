"""How fast data-free methods go through a checkpoint, against a plain copy of its files.

    python scripts/bench_datafree.py [--layers 16] [--hidden 2048] [--methods nf4 int8 fp8 gguf]

Makes a random Llama of about a billion parameters in bfloat16, copies its weight file (synced to disk, as
the jobs' output is), then runs each method with default options (gguf: Q8_0, rounded to nearest) in a process
of its own: everything it does, hashing and verification included. Prints GB read and written per second, the
ratio to the copy's, and peak memory above the interpreter's beside the size of a block. On a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import random_llama

JOB = """
import sys, time
from pathlib import Path
import torch
from quantkit.quantize import job, methods, loop
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.progress import Progress

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

torch.randn(64, 64) @ torch.randn(64, 64)
model, out, method = sys.argv[1:]
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
baseline, start = status("VmRSS"), time.perf_counter()
chosen = {"type": ("Q8_0",), "solver": "rtn", "imatrix": "none"} if method == "gguf" else {}
options = methods.load(method).Options(**chosen)
request = job.Request(source=model, method=method, options=options, output=Path(out),
                      calibration=CalibrationOptions(), run=RunOptions())
prepared = job.prepare(request, Progress())
ready = time.perf_counter() - start
(summary,) = loop.run_all([prepared], Progress())
seconds = time.perf_counter() - start
stages = {"prepare": ready} | summary.seconds
print(seconds, status("VmHWM") - baseline, ", ".join(f"{k} {v:.1f}" for k, v in stages.items()), sep="\\t")
"""


def copy_seconds(source: Path, target: Path) -> float:
    """Wall seconds of a plain copy, written through to the disk."""
    start = time.perf_counter()
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--methods", nargs="+", default=["nf4", "int8", "fp8", "gguf"])
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        shape = (args.hidden, 4 * args.hidden, args.layers, args.hidden // 64, 256, "bfloat16")
        size = random_llama.make(folder / "model", *shape)
        weights = folder / "model" / "model.safetensors"
        block = size / args.layers
        seconds = min(copy_seconds(weights, folder / f"copy-{k}") for k in range(2))
        rate = 2 * size / seconds / 1e9
        print(f"copy  {size / 1e9:.2f} GB in {seconds:.1f} s: {rate:.2f} GB/s moved")
        for path in folder.glob("copy-*"):
            path.unlink()
        for method in args.methods:
            output = folder / ("out.gguf" if method == "gguf" else "out")
            command = [sys.executable, "-c", JOB, str(folder / "model"), str(output), method]
            as_command = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
            environment = os.environ | as_command
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            seconds, peak, stages = done.stdout.strip().split("\t")
            seconds, peak = float(seconds), float(peak)
            written = output if output.is_file() else output / "model.safetensors"
            moved = (size + written.stat().st_size) / 1e9
            speed = f"{moved / seconds:.2f} GB/s moved, {moved / seconds / rate:.2f} of the copy's rate"
            memory = f"peak {peak / 2**20:.0f} MiB with blocks of {block / 2**20:.0f} MiB"
            print(
                f"{method:5s} {moved:.2f} GB in {seconds:.1f} s: {speed}; {memory}\n      {stages}",
                flush=True,
            )
            if output.is_dir():
                shutil.rmtree(output)
            else:
                output.unlink()


if __name__ == "__main__":
    main()
