"""Where a GPTQ job's time goes, against what the machine's own matrix products would take.

    python scripts/bench_gptq.py [--hidden 768 --intermediate 2048 --layers 2 --samples 32 --seqlen 512]

Makes a random Llama, quantizes it, and prints seconds for forward, Hessian, solve, pack and write.
The last line is the ratio that matters: forward + Hessian over the time their FLOPs (one forward, one
triangle of XᵀX per site) take at the matrix product rate measured in the same run, forward in the
model's dtype, Hessian in float32.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import random_llama


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in [
        ("hidden", 768), ("intermediate", 2048), ("layers", 2), ("heads", 12),
        ("samples", 32), ("seqlen", 512), ("threads", 1),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sequential", default="auto", choices=["auto", "suspend", "repeat"])
    parser.add_argument("--transform", default="auto")
    return parser.parse_args()


def matmul_rate(dtype, device, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of `[rows, inner] @ [inner, columns]`, the best of five after a warm-up."""
    import torch

    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best


def flops(args: argparse.Namespace) -> tuple[float, float]:
    """Forward (linears and attention) and Hessian (one triangle per site) of the whole job."""
    h, m, tokens = args.hidden, args.intermediate, args.samples * args.seqlen
    forward = 2 * tokens * (4 * h * h + 3 * h * m) + 2 * tokens * args.seqlen * h  # causal half of 4·T·S·h
    hessian = tokens * (3 * h * h + m * m)
    return args.layers * forward, args.layers * hessian


def main() -> None:
    args = parse()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    from quantkit.models.machine.device import choose_device
    from quantkit.options import CalibrationOptions, RunOptions
    from quantkit.quantize import job, loop
    from quantkit.quantize.methods.gptq import Options
    from quantkit.quantize.progress import Progress

    device = choose_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        random_llama.make(
            Path(folder) / "model",
            args.hidden,
            args.intermediate,
            args.layers,
            args.heads,
            args.seqlen,
            args.dtype,
        )
        request = job.Request(
            source=f"{folder}/model",
            method="gptq",
            options=Options(transform=args.transform),
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


if __name__ == "__main__":
    main()
