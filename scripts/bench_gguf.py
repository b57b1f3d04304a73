"""How fast ggml's block types are encoded, against ggml's own encoder on the same tensor in the same run.

    python scripts/bench_gguf.py [--types Q4_K Q6_K] [--threads 1 2] [--rows 1024] [--json FILE]

For every type, with and without importance weights: millions of weights per second of ggml (the library of
the xllamacpp wheel, called through ctypes; with two threads each has half of the rows), of quantkit's
search as a ratio to ggml's rate. Runs alternate and the best of each counts. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from quantkit.grids.ggml import TYPES
from quantkit.layouts.ggml.blocks import encode_rows
from quantkit.models.machine.memory import keep_freed_pages

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import ggml_library  # noqa: E402


def seconds(encoders: dict[str, Callable[[], torch.Tensor]], runs: int) -> dict[str, float]:
    """Wall seconds of the fastest of `runs` alternating runs of each."""
    best = dict.fromkeys(encoders, float("inf"))
    for _ in range(runs):
        for name, encode in encoders.items():
            start = time.perf_counter()
            encode()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(
    name: str, weight: torch.Tensor, importance: torch.Tensor | None, threads: int, runs: int
) -> dict:
    """One row of the table."""
    torch.set_num_threads(threads)
    parts = weight.split(-(-len(weight) // threads))

    def ggml() -> torch.Tensor:
        if threads == 1:
            return ggml_library.encode(name, weight, importance)
        return torch.cat(list(pool.map(lambda part: ggml_library.encode(name, part, importance), parts)))

    encoders = {"ggml": ggml, "quantkit": lambda: encode_rows(name, weight, importance)}
    with ThreadPoolExecutor(threads) as pool:
        encoded = {kind: encode() for kind, encode in encoders.items()}
        best = seconds(encoders, runs)
    return {
        "type": name,
        "importance": importance is not None,
        "threads": threads,
        "ggml_weights_per_second": weight.numel() / best["ggml"],
        "ratio": best["ggml"] / best["quantkit"],
        "bytes_equal": torch.equal(encoded["quantkit"], encoded["ggml"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    args = parser.parse_args()
    keep_freed_pages()  # as a job that needs no calibration does
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(args.rows, args.columns, generator=generator) * 0.02
    importance = torch.rand(args.columns, generator=generator) ** 4 + 1e-3
    rows = []
    print("| type | importance | threads | ggml, M weights/s | quantkit | bytes equal |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.types:
        for costs in (None, importance):
            for threads in args.threads:
                row = measure(name, weight, costs, threads, args.runs)
                rows.append(row)
                print(
                    f"| {name} | {'yes' if row['importance'] else 'no'} | {threads} "
                    f"| {row['ggml_weights_per_second'] / 1e6:.1f} | {row['ratio']:.2f} "
                    f"| {'yes' if row['bytes_equal'] else 'NO'} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
