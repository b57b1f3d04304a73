"""Measure how fast quantkit is, each time against what the same machine does in the same minutes.

    python scripts/bench.py gptq [--hidden 768 --intermediate 2048 --layers 2 --samples 32 --seqlen 512]
    python scripts/bench.py ranks | datafree | startup | gguf

gptq: where a job's time goes. The last line is the ratio that matters: forward + Hessian over the time their
    FLOPs (one forward, one triangle of XᵀX per site) take at the matrix product rate measured in the same
    run, forward in the model's dtype, Hessian in float32.
ranks: two processes of one thread against one process of two.
datafree: GB that data-free methods read and write per second, everything included, hashing and verification
    too, against a plain synced copy of the weight file; peak memory above the interpreter's beside a block.
startup: CPU seconds of the help and of a data-free job of a small model, against the imports they need. A
    job's own work is what it takes the second time in one process.
gguf: millions of weights per second that ggml's own encoder takes (the library of the xllamacpp package; with
    two threads each has half of the rows), and quantkit's search as a ratio to ggml's rate.

What is compared takes turns, and the best of each counts. Use a quiet machine: only ratios mean something on
another one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import DEMO, ROOT, random_model

PYTHON, QUANTKIT = [sys.executable, "-c"], [sys.executable, "-m", "quantkit"]


def best(ways: dict[str, Callable[[], float | None]], runs: int) -> dict[str, float]:
    """Return the least value of each way, or its least wall seconds where it returns None.

    The runs take turns, so a busy minute meets all of them.
    """
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(runs):
        for name, way in ways.items():
            start = time.perf_counter()
            value = way()
            seconds = time.perf_counter() - start if value is None else value
            found[name] = min(found[name], seconds)
    return found


def output(command: list[str], **environment: str) -> str:
    """Return the output of a process of this checkout with one thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def cpu_seconds(command: list[str]) -> float:
    """Return user and system time of the process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# gptq


def matmul_rate(dtype, device, rows: int, inner: int, columns: int) -> float:
    """Return FLOP/s of `[rows, inner] @ [inner, columns]`, the best of six."""
    import torch

    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)

    def product() -> None:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 2 * rows * inner * columns / best({"product": product}, 6)["product"]


def flops(args: argparse.Namespace) -> tuple[float, float]:
    """Return the job's FLOPs of forward (linears, attention) and Hessian (one triangle per site)."""
    h, m, tokens = args.hidden, args.intermediate, args.samples * args.seqlen
    forward = 2 * tokens * (4 * h * h + 3 * h * m) + 2 * tokens * args.seqlen * h  # causal half of 4·T·S·h
    hessian = tokens * (3 * h * h + m * m)
    return args.layers * forward, args.layers * hessian


def gptq(args: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    from quantkit.models.machine.device import choose_device
    from quantkit.options import CalibrationOptions, RunOptions
    from quantkit.quantize import job, loop, methods
    from quantkit.quantize.progress import Progress

    device = choose_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        shape = args.hidden, args.intermediate, args.layers, args.heads
        random_model(Path(folder) / "model", *shape, context=args.seqlen, dtype=args.dtype)
        request = job.Request(
            source=f"{folder}/model",
            method=methods.create("gptq", transform=args.transform),
            calibration=CalibrationOptions(samples=args.samples, seqlen=args.seqlen),
            run=RunOptions(
                dtype=args.dtype, device=str(device), threads=args.threads, sequential=args.sequential
            ),
            output=Path(folder) / "out",
        )
        prepared = job.prepare(request, Progress())
        args.samples = prepared.calibration.provenance.samples
        forward_rate = matmul_rate(getattr(torch, args.dtype), device, 4096, args.hidden, args.intermediate)
        hessian_rate = matmul_rate(torch.float32, device, args.hidden, 4096, args.hidden)
        before = time.process_time()
        summary = loop.run(prepared, Progress())
        cpu = time.process_time() - before
    forward, hessian = flops(args)
    ideal = forward / forward_rate + hessian / hessian_rate
    measured = summary.seconds["forward"] + summary.seconds["hessian"]
    execution = prepared.plan.execution
    print(
        f"{args.layers} blocks of {args.hidden}/{args.intermediate}, {args.samples} × {args.seqlen} tokens, "
        f"{execution.dtype}, {execution.device}, {execution.threads} threads, {execution.sequential}"
    )
    for stage, seconds in summary.seconds.items():
        print(f"{stage:10s} {seconds:8.2f} s")
    print(f"whole job  {cpu:8.2f} CPU s")
    print(f"matmul     {forward_rate / 1e9:8.0f} GFLOP/s {args.dtype}, {hessian_rate / 1e9:.0f} float32")
    print(f"forward + Hessian: {measured:.2f} s, {measured / ideal:.2f} × their FLOPs at that rate")


# ranks


def job_seconds(command: list[str], out: Path, turns: list[dict[str, float]]) -> float:
    """Return wall seconds of the job; those of the whole command and of the stages are added to `turns`."""
    start = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    output([*command, "-o", str(out)])
    whole = time.perf_counter() - start
    seconds = json.loads((out / "quantkit-timings.json").read_text())["seconds"]
    turns.append({"command": whole, "job": sum(seconds.values())} | seconds)
    return turns[-1]["job"]


def ranks(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model", Path(folder) / "out"
        shape = args.hidden, args.intermediate, args.layers, args.heads
        random_model(model, *shape, context=args.seqlen)
        job = [*args.method, str(model), "--samples", str(args.samples), "--seqlen", str(args.seqlen), "-q"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quantkit"]
        ways = {
            "one process of two threads": [*QUANTKIT, *job, "--threads", "2"],
            "two processes of one thread": [*torchrun, *job, "--threads", "1"],
        }
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        timed = {
            name: lambda name=name, command=command: job_seconds(command, out, turns[name])
            for name, command in ways.items()
        }
        one, two = best(timed, args.repeat).values()
    for name, runs in turns.items():
        least = min(runs, key=lambda run: run["job"])
        stages = ", ".join(f"{stage} {value:.1f}" for stage, value in least.items() if value >= 0.05)
        print(f"{name}: {stages} s")
    print(f"two processes take {two / one:.2f} of the time of one (best of {args.repeat} each)")


# datafree

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
method = methods.create(method, **chosen)
request = job.Request(source=model, method=method, output=Path(out),
                      calibration=CalibrationOptions(), run=RunOptions())
prepared = job.prepare(request, Progress())
ready = time.perf_counter() - start
(summary,) = loop.run_all([prepared], Progress())
seconds = time.perf_counter() - start
stages = {"prepare": ready} | summary.seconds
print(seconds, status("VmHWM") - baseline, ", ".join(f"{k} {v:.1f}" for k, v in stages.items()), sep="\\t")
"""


def copy(source: Path, target: Path) -> None:
    """A plain copy of the weights, written through to the disk as the jobs' output is, then removed."""
    target.mkdir()
    for weights in source.glob("*.safetensors"):
        with open(shutil.copy(weights, target), "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(target)


def datafree(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        shape = args.hidden, 4 * args.hidden, args.layers, args.hidden // 64
        size = random_model(folder / "model", *shape, context=256)
        block = size / args.layers
        seconds = best({"copy": lambda: copy(folder / "model", folder / "copy")}, 2)["copy"]
        rate = 2 * size / seconds / 1e9
        print(f"copy  {size / 1e9:.2f} GB in {seconds:.1f} s: {rate:.2f} GB/s moved")
        for method in args.methods:
            out = folder / ("out.gguf" if method == "gguf" else "out")
            command = [sys.executable, "-c", JOB, str(folder / "model"), str(out), method]
            as_command = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
            threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
            done = output(command, OMP_NUM_THREADS=threads, **as_command)
            seconds, peak, stages = done.strip().split("\t")
            seconds, peak = float(seconds), float(peak)
            written = out if out.is_file() else out / "model.safetensors"
            moved = (size + written.stat().st_size) / 1e9
            speed = f"{moved / seconds:.2f} GB/s moved, {moved / seconds / rate:.2f} of the copy's rate"
            memory = f"peak {peak / 2**20:.0f} MiB with blocks of {block / 2**20:.0f} MiB"
            print(
                f"{method:5s} {moved:.2f} GB in {seconds:.1f} s: {speed}; {memory}\n      {stages}",
                flush=True,
            )
            if out.is_dir():
                shutil.rmtree(out)
            else:
                out.unlink()


# startup

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


def show(measured: dict[str, float], references: list[str]) -> None:
    """A line per command, with its ratio to each of the references."""
    for name, seconds in measured.items():
        ratios = "".join(f"{seconds / measured[other]:9.2f} x {other}" for other in references)
        print(f"{name:55s} {seconds:7.3f} s{ratios}")


def startup(args: argparse.Namespace) -> None:
    def least(commands: dict[str, list[str]], runs: int) -> dict[str, float]:
        return best({name: lambda typed=typed: cpu_seconds(typed) for name, typed in commands.items()}, runs)

    show(least(HELP, 2 * args.runs), ["python -c pass", "import typer, rich"])
    print()
    with tempfile.TemporaryDirectory() as folder:
        job = ["nf4", str(DEMO), "-o", str(Path(folder) / "out"), "--overwrite", "--json", "--quiet"]
        commands = {
            LIBRARIES: [*PYTHON, LIBRARIES],
            CLASS: [*PYTHON, CLASS],
            "quantkit nf4": [*QUANTKIT, *job],
        }
        measured = least(commands, args.runs)
        own = min(float(output([*PYTHON, TWICE, *job]).splitlines()[-1]) for _ in range(args.runs))
    show(measured, [LIBRARIES, CLASS])
    starting = (measured["quantkit nf4"] - own) / measured[CLASS]
    print(f"its own work {own:.3f} s; all the rest is {starting:.2f} times the import of the model's class")


# gguf


def encoded(name: str, weight, importance, threads: int, runs: int) -> dict:
    """One row of the table."""
    import torch

    sys.path.append(str(ROOT / "tests"))
    import ggml_library

    from quantkit.layouts.ggml.blocks import encode_rows

    torch.set_num_threads(threads)
    parts, made = weight.split(-(-len(weight) // threads)), {}

    def ggml() -> None:
        pieces = pool.map(lambda part: ggml_library.encode(name, part, importance), parts)
        made["ggml"] = torch.cat(list(pieces))

    def ours() -> None:
        made["quantkit"] = encode_rows(name, weight, importance)

    with ThreadPoolExecutor(threads) as pool:
        ways = {"ggml": ggml, "quantkit": ours}
        best(ways, 1)  # constants and caches
        seconds = best(ways, runs)
    return {
        "type": name,
        "importance": importance is not None,
        "threads": threads,
        "ggml_weights_per_second": weight.numel() / seconds["ggml"],
        "ratio": seconds["ggml"] / seconds["quantkit"],
        "bytes_equal": torch.equal(made["quantkit"], made["ggml"]),
    }


def gguf(args: argparse.Namespace) -> None:
    import torch

    from quantkit.grids.ggml import TYPES
    from quantkit.models.machine.memory import keep_freed_pages

    keep_freed_pages()  # as a job that needs no calibration does
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(args.rows, args.columns, generator=generator) * 0.02
    importance = torch.rand(args.columns, generator=generator) ** 4 + 1e-3
    rows = []
    print("| type | importance | threads | ggml, M weights/s | quantkit | bytes equal |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.types or TYPES:
        for costs in (None, importance):
            for threads in args.threads:
                row = encoded(name, weight, costs, threads, args.runs)
                rows.append(row)
                print(
                    f"| {name} | {'yes' if row['importance'] else 'no'} | {threads} "
                    f"| {row['ggml_weights_per_second'] / 1e6:.1f} | {row['ratio']:.2f} "
                    f"| {'yes' if row['bytes_equal'] else 'NO'} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="PART")

    def part(run: Callable, **numbers: int) -> argparse.ArgumentParser:
        made = parts.add_parser(run.__name__)
        made.set_defaults(run=run)
        for name, value in numbers.items():
            made.add_argument(f"--{name}", type=int, default=value)
        return made

    one = part(gptq, hidden=768, intermediate=2048, layers=2, heads=12, samples=32, seqlen=512, threads=1)
    one.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    one.add_argument("--device", default="auto")
    one.add_argument("--sequential", default="auto", choices=["auto", "suspend", "repeat"])
    one.add_argument("--transform", default="auto")
    one = part(ranks, hidden=768, intermediate=2048, layers=3, heads=12, samples=64, seqlen=512, repeat=2)
    one.add_argument("--method", nargs="+", default=["gptq"])
    one = part(datafree, layers=16, hidden=2048)
    one.add_argument("--methods", nargs="+", default=["nf4", "int8", "fp8", "gguf"])
    one.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    part(startup, runs=5)
    one = part(gguf, rows=1024, columns=4096, runs=3)
    one.add_argument("--types", nargs="+", help="default: all")
    one.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    one.add_argument("--json", type=Path, help="write the rows there, too")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
