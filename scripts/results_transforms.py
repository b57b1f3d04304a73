"""KL divergence and CPU seconds by transform, on the demo model and its twin with outlier channels.

    python scripts/results_transforms.py --text frankenstein.txt [--only "nf4"] [--transforms none,awq,auto]
                                         [--samples 48] [--limit 10240]

Each row is a job, each column a `--transform`. A job runs on one thread; its CPU seconds stand in brackets.
Prints Markdown, a row as soon as it is known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import outlier_twin
import results
from client_runs import ROOT

from quantkit.options import CalibrationOptions, RunOptions

TRANSFORMS = "none", "auto", "rotate-v+auto", "rotate", "rotate+auto"
JOBS = {
    "gptq 4 bit": ("gptq", {}),
    "gptq 3 bit": ("gptq", {"bits": 3}),
    "gptq 3 bit, zero points": ("gptq", {"bits": 3, "sym": False}),
    "gptq 2 bit": ("gptq", {"bits": 2}),
    "nf4": ("nf4", {"solver": "rtn"}),
    "nf4 gptq": ("nf4", {"solver": "gptq"}),
    "Q2_K": ("gguf", {"type": ("Q2_K",)}),
    "Q3_K_M": ("gguf", {"type": ("Q3_K_M",)}),
    "Q4_K_M": ("gguf", {"type": ("Q4_K_M",)}),
}


def row(original: str, model: str, made: results.Job, args: argparse.Namespace) -> list[str]:
    """Return a cell for each transform: KL divergence from the original, and CPU seconds of the job."""
    method, options = made
    outputs, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for transform in args.transforms:
            before = time.process_time()
            outputs[transform] = results.quantize(
                model,
                Path(folder),
                f"{method} {transform}",
                (method, options | {"transform": transform}),
                RunOptions(threads=1),
                CalibrationOptions(samples=args.samples),
            )
            seconds[transform] = time.process_time() - before
        found = results.divergences(results.compare(original, outputs.values(), args), outputs)
    return [f"{found[name]:.5f} ({seconds[name]:.1f} s)" for name in args.transforms]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=10240)
    parser.add_argument("--samples", type=int, default=48, help="calibration sequences")
    parser.add_argument("--only", default="", help="jobs that contain this text")
    parser.add_argument("--transforms", type=lambda text: text.split(","), default=TRANSFORMS)
    args = parser.parse_args()
    demo = ROOT / "tests/data/demo-llama-6m"
    print("| | " + " | ".join(args.transforms) + " |\n| --- |" + " ---: |" * len(args.transforms))
    with tempfile.TemporaryDirectory() as folder:
        twin = outlier_twin.make(demo, Path(folder) / "twin")
        for name, made in JOBS.items():
            for kind, model in {"": demo, ", twin": twin}.items():
                if args.only in f"{name}{kind}":
                    cells = " | ".join(row(str(demo), str(model), made, args))
                    print(f"| {name}{kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
