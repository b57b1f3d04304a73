"""Measure how fast quantkit is, each time against what the same machine does in the same minutes.

    python scripts/bench.py gptq [--hidden 768 --intermediate 2048 --layers 2 --samples 32 --seqlen 512]
    python scripts/bench.py ranks | gguf

gptq: where a job's time goes. The last line is the ratio that matters: forward + Hessian over the time their
    FLOPs (one forward, one triangle of XᵀX per site) take at the matrix product rate measured in the same
    run, forward in bfloat16, Hessian in float32.
ranks: two processes of one thread against one process of two.
gguf: millions of weights per second that ggml's own encoder takes (the library of the xllamacpp package; with
    two threads each has half of the rows), and quantkit's search as a ratio to ggml's rate.

What is compared takes turns, and the best of each counts. Use a quiet machine: only ratios mean something on
another one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, random_model, table

Seconds = dict[str, float]


def best(ways: dict[str, Callable[[], object]], runs: int) -> Seconds:
    """Return the least wall seconds of each way. The runs take turns, so a busy minute meets all of them."""
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(runs):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def job_seconds(folder: Path, args: argparse.Namespace, threads: int, launcher=(), flags=()) -> Seconds:
    """Run a gptq job on a random model of the given shape; return wall seconds of its stages."""
    model, out = folder / "model", folder / "out"
    random_model(model, args.hidden, args.intermediate, args.layers, args.heads, context=args.seqlen)
    command = [sys.executable, *launcher, "-m", "quantkit", "gptq", str(model), "-o", str(out), "--overwrite"]
    command += [
        "--samples",
        str(args.samples),
        "--seqlen",
        str(args.seqlen),
        "--threads",
        str(threads),
        "-q",
        *flags,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, "-q", *flags], env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = json.loads((out / "quantkit-timings.json").read_text())["seconds"]
    shutil.rmtree(out)
    return seconds


def stages(seconds: Seconds) -> str:
    return ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)


# gptq


def product_rate(dtype, rows: int, inner: int, columns: int) -> float:
    """Return FLOP/s of `[rows, inner] @ [inner, columns]`, the best of six."""
    import torch

    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    return 2 * rows * inner * columns / best({"product": lambda: left @ right}, 6)["product"]


def gptq(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    h, m, tokens = args.hidden, args.intermediate, args.samples * args.seqlen
    # linears, and the causal half of attention; one triangle per site
    forward = args.layers * (2 * tokens * (4 * h * h + 3 * h * m) + 2 * tokens * args.seqlen * h)
    hessian = args.layers * tokens * (3 * h * h + m * m)
    ideal = forward / product_rate(torch.bfloat16, 4096, h, m)
    ideal += hessian / product_rate(torch.float32, h, 4096, h)
    with tempfile.TemporaryDirectory() as folder:
        seconds = job_seconds(Path(folder), args, args.threads, flags=("--dtype", "bfloat16"))
    measured = seconds["forward"] + seconds["hessian"]
    print(f"{args.layers} blocks of {h}/{m}, {args.samples} × {args.seqlen} tokens: {stages(seconds)} s")
    print(
        f"forward + Hessian: {measured:.2f} s, {measured / ideal:.2f} × their FLOPs at the rate of products"
    )


# ranks


def ranks(args: argparse.Namespace) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    ways = {"one process of two threads": (2, ()), "two processes of one thread": (1, torchrun)}
    runs: dict[str, list[Seconds]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            for name, (threads, launcher) in ways.items():
                runs[name].append(job_seconds(Path(folder), args, threads, launcher))
    one, two = (min(of_way, key=lambda run: sum(run.values())) for of_way in runs.values())
    for name, least in zip(ways, (one, two), strict=True):
        print(f"{name}: {stages(least)} s")
    ratio = sum(two.values()) / sum(one.values())
    print(f"two processes take {ratio:.2f} of the time of one (best of {args.repeat} each)")


# gguf


def encoded(name: str, weight, importance, threads: int, runs: int) -> list[str]:
    """Return a row of the table."""
    import torch

    sys.path.append(str(ROOT / "tests"))
    import ggml_library

    from quantkit.layouts.ggml.blocks import encode_rows

    torch.set_num_threads(threads)
    parts, made = weight.split(-(-len(weight) // threads)), {}

    def ggml() -> None:
        made["ggml"] = torch.cat([*pool.map(lambda part: ggml_library.encode(name, part, importance), parts)])

    def ours() -> None:
        made["quantkit"] = encode_rows(name, weight, importance)

    with ThreadPoolExecutor(threads) as pool:
        ways = {"ggml": ggml, "quantkit": ours}
        best(ways, 1)  # constants and caches
        seconds = best(ways, runs)
    rate, ratio = weight.numel() / seconds["ggml"] / 1e6, seconds["ggml"] / seconds["quantkit"]
    equal = torch.equal(made["quantkit"], made["ggml"])
    row = [name, "no" if importance is None else "yes", str(threads), f"{rate:.1f}", f"{ratio:.2f}"]
    return [*row, "yes" if equal else "NO"]


def gguf(args: argparse.Namespace) -> None:
    import torch

    from quantkit.grids.ggml import TYPES
    from quantkit.models.machine.memory import keep_freed_pages

    keep_freed_pages()  # as a job that needs no calibration does
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(args.rows, args.columns, generator=generator) * 0.02
    importance = torch.rand(args.columns, generator=generator) ** 4 + 1e-3
    rows = [
        encoded(name, weight, costs, threads, args.runs)
        for name in args.types or TYPES
        for costs in (None, importance)
        for threads in args.threads
    ]
    print(table(["type", "importance", "threads", "ggml, M weights/s", "quantkit", "bytes equal"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True, metavar="PART")

    def part(run: Callable, **numbers: int) -> argparse.ArgumentParser:
        added = parts.add_parser(run.__name__)
        added.set_defaults(run=run)
        for name, value in numbers.items():
            added.add_argument(f"--{name}", type=int, default=value)
        return added

    part(gptq, hidden=768, intermediate=2048, layers=2, heads=12, samples=32, seqlen=512, threads=1)
    part(ranks, hidden=768, intermediate=2048, layers=3, heads=12, samples=64, seqlen=512, repeat=2)
    added = part(gguf, rows=1024, columns=4096, runs=3)
    added.add_argument("--types", nargs="+", help="default: all")
    added.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
