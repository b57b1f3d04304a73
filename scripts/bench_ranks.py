"""Two processes of one thread against one process of two, and what eight GPUs would have to do, on paper.

    python scripts/bench_ranks.py [--hidden 768 --intermediate 2048 --layers 3 --samples 64 --seqlen 512]
    python scripts/bench_ranks.py --paper          (the tables alone; nothing is run)

The first part makes a random Llama and quantizes it both ways, in turn, in the same minutes, so that what
else the machine does hits both; the ratio is the result. The second counts floating-point operations and
bytes of a block, and what of it every rank has to do for itself; rates of a GPU stand at the top of this
file, and are assumptions.
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

RANKS = 8
TOKENS = 128 * 2048
FORWARD_FLOPS, FLOAT32_FLOPS = 400e12, 40e12  # a GPU's, in 16 bit and in float32 (H100: dense 989 and 67)
LINK_BYTES = 300e9  # a second between two GPUs of a host, one way (NVLink 4: 450)
LAUNCH_SECONDS = 5e-6
PRODUCTS = 10  # operations of the solver on a linear, in out · in² (methods/gptq.py)
LAUNCHES = 3 * 3  # a column: three in the sweep, and as many in each of two cycles of refinement


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("hidden", 768), ("intermediate", 2048), ("layers", 3), ("heads", 12),
        ("samples", 64), ("seqlen", 512), ("repeat", 2),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--method", nargs="+", default=["gptq"])
    parser.add_argument("--paper", action="store_true", help="print the tables alone")
    return parser.parse_args()


# ---- measured


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


# ---- on paper


Site = tuple[int, int, int, int, float]


def dense(hidden: int, inner: int, key_values: int) -> list[Site]:
    """Sites of a block: width, outputs of all linears and of those that one rank solves, how many such sites,
    and the share of the tokens that enter each."""
    return [
        (hidden, hidden + 2 * key_values, hidden, 1, 1.0),
        (hidden, hidden, hidden, 1, 1.0),
        (hidden, 2 * inner, inner, 1, 1.0),
        (inner, hidden, hidden, 1, 1.0),
    ]


def mixture(hidden: int, inner: int, experts: int, active: int) -> list[Site]:
    """The same of a block with experts, attention as large as a dense model's."""
    share = active / experts
    attention = dense(hidden, inner, hidden // 8)[:2]
    return [
        *attention,
        (hidden, 2 * inner, 2 * inner, experts, share),
        (inner, hidden, hidden, experts, share),
    ]


MODELS = {
    "70B, dense": (80, dense(8192, 28672, 1024)),
    "600B, 256 experts, 8 active": (61, mixture(7168, 2048, 256, 8)),
}


def paper(name: str, blocks: int, sites: list[Site]) -> None:
    """What a block takes on one GPU and on RANKS of them, in seconds."""
    forward = sum(2 * TOKENS * share * width * out * many for width, out, _, many, share in sites)
    moments = sum(TOKENS * share * width**2 * many for width, _, _, many, share in sites)
    factor = sum(width**3 / 3 * many for width, _, _, many, _ in sites)
    sweep = sum(PRODUCTS * out * width**2 * many for width, out, _, many, _ in sites)
    own = sum(PRODUCTS * out * width**2 * -(-many // RANKS) for width, _, out, many, _ in sites) / sweep
    launches = sum(LAUNCHES * width * many for width, _, _, many, _ in sites)
    dealt = sum(LAUNCHES * width * -(-many // RANKS) for width, _, _, many, _ in sites) / launches
    spread = sum(width**3 / 3 * -(-many // RANKS) for width, _, _, many, _ in sites) / factor
    sums = sum(4 * width**2 * many for width, _, _, many, _ in sites)
    codes = sum(width * out * many for width, out, _, many, _ in sites)  # a byte each
    link = 2 * (RANKS - 1) / RANKS * sums + codes
    solve, calls = sweep / FLOAT32_FLOPS, launches * LAUNCH_SECONDS  # whichever takes longer hides the other
    rows = [
        (
            "forward",
            f"{forward:.1e} FLOP in 16 bit",
            forward / FORWARD_FLOPS,
            forward / FORWARD_FLOPS / RANKS,
        ),
        (
            "second moments",
            f"{moments:.1e} FLOP in float32",
            moments / FLOAT32_FLOPS,
            moments / FLOAT32_FLOPS / RANKS,
        ),
        (
            "factors of them",
            f"{factor:.1e} FLOP in float32",
            factor / FLOAT32_FLOPS,
            factor / FLOAT32_FLOPS * spread,
        ),
        ("sweep, refinement", f"{sweep:.1e} FLOP in float32", solve, solve * own),
        ("their launches", f"{launches:.1e} one after another", calls, calls * dealt),
        ("sums and codes", f"{link / 1e9:.1f} GB over each link", 0.0, link / LINK_BYTES),
    ]
    print(f"{name}: a block of {blocks}, {TOKENS:,} tokens")
    print(f"| what | how much | one GPU, s | {RANKS} GPUs, s |")
    print("| --- | --- | ---: | ---: |")
    for what, how_much, one, many in rows:
        print(f"| {what} | {how_much} | {one:.2f} | {many:.2f} |")
    one = sum(row[2] for row in rows) - min(solve, calls)
    many = sum(row[3] for row in rows) - min(solve * own, calls * dealt)
    print(f"| a block: {one / many:.1f} times as fast | | {one:.1f} | {many:.1f} |")
    print(f"| all blocks | | {one * blocks / 60:.0f} min | {many * blocks / 60:.0f} min |\n")


def main() -> None:
    args = parse()
    if not args.paper:
        measure(args)
    for name, (blocks, sites) in MODELS.items():
        paper(name, blocks, sites)


if __name__ == "__main__":
    main()
