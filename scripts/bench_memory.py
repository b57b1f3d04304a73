"""Peak memory of jobs against what was planned, against depth and experts, and under a hard limit.

    python scripts/bench_memory.py                                        # 4 and 32 blocks: no growth
    python scripts/bench_memory.py --hidden 1024 --inner 512 --experts 8 64 --blocks 1
    python scripts/bench_memory.py --hidden 3072 --inner 8192 --heads 24 --key-values 8 --vocabulary 128256 \\
        --blocks 56 --limit 6 --jobs nf4 int8 gguf-rtn eval --work big    # larger than memory

Makes random checkpoints in bfloat16, of Llama's shape or with `--experts` of Qwen3-MoE's, a block in memory
at a time, and runs each job in a process of its own. Printed are the peak resident memory of that process
(ru_maxrss), what `--dry-run` said before anything was loaded, and the seconds. With `--limit` each runs with
`--max-memory` and under `ulimit -v` of so many GB: one that takes more fails. Exit code 1 where a job fails,
or its peak is more than a quarter above the plan, which interpreters may take, or below `--least` of it. The
models stay in `--work`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, random_model

INTERPRETER = 300 << 20  # Python, torch and transformers: see quantkit/capacity/job.py
TEXT = next((ROOT / "calibration").glob("*.txt"))
JOBS = {
    "nf4": ["nf4"],
    "int8": ["int8", "--allow-unread"],
    "fp8": ["fp8"],
    "gguf-rtn": ["gguf", "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none"],
    "gguf": ["gguf", "-t", "Q4_K_M"],
    "gptq": ["gptq"],
    "gptq-unscaled": ["gptq", "--transform", "none"],
    "gptq-repeat": ["gptq", "--sequential", "repeat"],
    "awq": ["awq"],
    "eval": ["eval"],
}
CALIBRATED = ("gguf", "gptq", "gptq-unscaled", "gptq-repeat", "awq")


def make(args: argparse.Namespace, blocks: int, experts: int) -> tuple[Path, int]:
    """Return the folder of the random model, made unless it is there, and the bytes of its weights."""
    shape = args.hidden, args.inner, blocks, args.heads, args.key_values, experts
    folder = args.work.absolute() / "-".join(map(str, (*shape, args.vocabulary)))
    return folder, random_model(folder, *shape, vocabulary=args.vocabulary)


def command(args: argparse.Namespace, model: Path, name: str, out: Path) -> list[str]:
    """Return the command line of one job."""
    method, *rest = JOBS[name]
    line = [sys.executable, "-m", "quantkit", method, str(model), *rest, "--quiet", "--json"]
    line += ["--max-memory", f"{args.limit:g}GB"] if args.limit else []
    if name == "eval":
        return [*line, "--text", str(TEXT), "--limit", str(args.eval_tokens), "--ctx", str(args.seqlen)]
    line += ["--samples", str(args.samples), "--seqlen", str(args.seqlen)] if name in CALIBRATED else []
    return [*line, "-o", str(out), "--overwrite"]


def measure(args: argparse.Namespace, model: Path, name: str) -> tuple[int, int | None, float, int]:
    """Run one job; return peak bytes, planned bytes (None for eval: no dry run), seconds, exit code."""
    out = args.work.absolute() / ("out.gguf" if name.startswith("gguf") else "out")
    line = command(args, model, name, out)
    nbytes = int(args.limit * 1e9)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def limited() -> None:
        if nbytes:
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))

    planned = None
    if name != "eval":
        planning = subprocess.run(
            [*line, "--dry-run"], env=environment, stdout=subprocess.PIPE, check=True, preexec_fn=limited
        )
        planned = json.loads(planning.stdout)["plan"]["memory_bytes"] + INTERPRETER
    began = time.monotonic()
    with open(out.with_suffix(".log"), "w") as log:
        child = subprocess.Popen(line, env=environment, stdout=log, stderr=log, preexec_fn=limited)
        _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - began
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return usage.ru_maxrss << 10, planned, seconds, os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("memory"), help="where models and outputs lie")
    parser.add_argument("--jobs", nargs="+", default=["gptq", "nf4", "gguf-rtn"], choices=list(JOBS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--experts", type=int, nargs="+", default=[0])
    for name, default in [
        ("hidden", 1024), ("inner", 2816), ("heads", 16), ("key-values", 0), ("vocabulary", 4096),
        ("samples", 8), ("seqlen", 256), ("eval-tokens", 2048),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=0, help="GB of address space (default: none)")
    parser.add_argument("--least", type=float, default=0.5)
    args = parser.parse_args()
    wrong = False
    print("| blocks | experts | model | job | peak | planned | peak / planned | seconds |")
    print(f"| ---: | ---: | ---: | --- |{' ---: |' * 4}")
    for name in args.jobs:
        for blocks in args.blocks:
            for experts in args.experts:
                model, size = make(args, blocks, experts)
                peak, planned, seconds, code = measure(args, model, name)
                off = peak / planned if planned else 1.0
                wrong = wrong or bool(code) or not args.least <= off <= 1.25
                cells = [
                    str(blocks), str(experts), f"{size / 1e9:.2f} GB", name,
                    f"failed ({code})" if code else f"{peak / 1e9:.3f} GB",
                    f"{planned / 1e9:.3f} GB" if planned else "–", f"{off:.2f}", f"{seconds:.0f}",
                ]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
