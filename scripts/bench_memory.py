"""Peak memory of a job against the number of blocks: it must not grow.

    python scripts/bench_memory.py [--job gptq] [--width 1024 --depths 4 32 --samples 8 --seqlen 256]

The gguf job is `--solver rtn --imatrix none`, which holds one tensor and its codes at a time. Each job runs
in a process of its own on a random Llama; what is printed is the process's peak resident memory (VmHWM)
above what it held after the imports, before the job.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import random_llama

JOB = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from quantkit.quantize import job, methods, loop
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.progress import Progress

def status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) / 1024

def prepare(model):
    return job.prepare(job.Request(
        source=model, method=method, options=methods.load(method).Options(**options), output=Path(out),
        calibration=CalibrationOptions(samples=int(samples), seqlen=int(seqlen)),
        run=RunOptions(threads=1, sequential=mode), overwrite=True,
    ), Progress())

torch.randn(64, 64) @ torch.randn(64, 64)
method, tiny, model, out, samples, seqlen, mode = sys.argv[1:]
options = {"solver": "rtn", "imatrix": "none"} if method == "gguf" else {}
if method == "gguf":  # whose promise is so small that what it imports on its way would hide it
    loop.run(prepare(tiny), Progress())
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
baseline = status("VmRSS")
prepared = prepare(model)
predicted = prepared.plan.memory_bytes / 2**20
loop.run(prepared, Progress())
print(baseline, status("VmHWM") - baseline, predicted)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="gptq", choices=["gptq", "gguf"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--sequential", default="suspend", choices=["suspend", "repeat"])
    args = parser.parse_args()
    peaks = []
    largest = args.width * max(args.width * 11 // 4, 4096)  # the embedding may be it
    for depth in args.depths:
        with tempfile.TemporaryDirectory() as folder:
            shape = (args.width, args.width * 11 // 4, depth, args.width // 64, args.seqlen, "bfloat16")
            size = random_llama.make(Path(folder) / "model", *shape)
            random_llama.make(Path(folder) / "tiny", 256, 512, 1, 4, 256, "bfloat16")
            arguments = [
                args.job,
                f"{folder}/tiny",
                f"{folder}/model",
                f"{folder}/out.gguf",
                args.samples,
                args.seqlen,
                args.sequential,
            ]
            command = [sys.executable, "-c", JOB, *map(str, arguments)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        baseline, peak, predicted = map(float, output.split())
        peaks.append(peak)
        print(
            f"{depth:3d} blocks, model {size / 2**20:7.1f} MiB: peak {peak:7.1f} MiB "
            f"above {baseline:.0f} MiB, predicted {predicted:.1f}",
            flush=True,
        )
    print(f"largest tensor in float32: {largest * 4 / 2**20:.1f} MiB")
    print(
        f"growth from {args.depths[0]} to {args.depths[-1]} blocks: {100 * (peaks[-1] / peaks[0] - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
