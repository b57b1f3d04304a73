"""quantkit against GPTQModel: same model, same calibration tokens, same bytes; which loses less, how fast.

    QUANTKIT_CLIENTS_PYTHON=.venv-clients/bin/python python scripts/compare_gptqmodel.py \\
        --calibration text.txt --text held-out.txt [--bits 4 3] [--samples 128 --seqlen 256]

GPTQModel runs in its own environment, once with its defaults and once with its range search
(`mse=2.4`); both tools use one thread. Prints KL divergence to the original and CPU seconds of the
quantization phase, imports and loading left out.
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

PEER = """
import json, os, sys, time
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
import torch
torch.set_num_threads(1)
from gptqmodel import GPTQModel
from gptqmodel.quantization import GPTQConfig
model, tokens, out, bits, mse = sys.argv[1:]
loaded = GPTQModel.load(model, GPTQConfig(bits=int(bits), group_size=128, mse=float(mse), device="cpu"))
rows = json.load(open(tokens))
start = time.process_time()
loaded.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
seconds = time.process_time() - start
loaded.save(out)
print("CPU", seconds)
"""


def run_peer(model: str, tokens: Path, out: Path, bits: int, mse: float) -> float:
    """CPU seconds of GPTQModel's quantization; the checkpoint lies in `out`."""
    python = str(Path(os.environ["QUANTKIT_CLIENTS_PYTHON"]).absolute())
    command = [python, "-c", PEER, model, str(tokens), str(out), str(bits), str(mse)]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    output = subprocess.run(  # it leaves logs where it runs
        command, env=environment, cwd=tokens.parent, check=True, capture_output=True, text=True
    ).stdout
    return float(output.rpartition("CPU")[2].split()[0])


def run_quantkit(model: str, calibration, out: Path, bits: int) -> float:
    """CPU seconds of the loop, verification and writing included."""
    from quantkit import job, pipeline
    from quantkit.methods.gptq import Options
    from quantkit.options import RunOptions
    from quantkit.progress import Progress

    request = job.Request(model, "gptq", Options(bits=bits), calibration, RunOptions(threads=1), output=out)
    prepared = job.prepare(request, Progress())
    start = time.process_time()
    pipeline.run(prepared, Progress())
    return time.process_time() - start


def main() -> None:
    root = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(root / "tests/data/demo-llama-6m"))
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=40960)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch

    from quantkit import calibration, evaluate
    from quantkit.checkpoint import Checkpoint
    from quantkit.options import CalibrationOptions

    base = Checkpoint.open(args.model)
    options = CalibrationOptions(args.calibration, samples=args.samples, seqlen=args.seqlen)
    rows: list[tuple[str, float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps(calibration.load(base, options).tokens.tolist()))
        for bits in args.bits:
            for label, mse in (("GPTQModel", 0.0), ("GPTQModel, mse", 2.4)):
                out = Path(folder) / f"peer-{bits}-{mse}"
                rows.append((f"{label}, {bits} bit", run_peer(args.model, tokens, out, bits, mse), str(out)))
            out = Path(folder) / f"quantkit-{bits}"
            rows.append((f"quantkit, {bits} bit", run_quantkit(args.model, options, out, bits), str(out)))
            print(f"{bits} bit done", file=sys.stderr)
        windows = evaluate.load_windows(base, args.text, args.ctx, None, args.limit)
        checkpoints = [base, *(Checkpoint.open(out) for _, _, out in rows)]
        results = evaluate.evaluate(checkpoints, windows, torch.float32, torch.device("cpu"))[1:]
    print("| | weight bytes | KL divergence | CPU seconds |\n| --- | ---: | ---: | ---: |")
    for (name, seconds, _), result in zip(rows, results, strict=True):
        print(f"| {name} | {result.weight_bytes:,} | {result.metrics.kld:.5f} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
