"""What a transform brings: KL divergence and CPU seconds of one job with each, on a model and its twin.

    python scripts/compare_transforms.py [MODEL] --text TEXT [--method gptq] [--set bits=3 ...] [--limit N]
                                         [--transforms none,awq,auto]

The twin computes the same, with outlier channels (outlier_twin.py). CPU seconds are those of the
quantization, one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import outlier_twin
import torch
from client_runs import DEMO, table

from quantkit.evaluation import evaluate
from quantkit.evaluation import windows as windows_of
from quantkit.models.open import open_checkpoint
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, loop, methods
from quantkit.quantize.progress import Progress


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--transforms", default="none,awq,auto")
    parser.add_argument("--limit", type=int, default=20480, help="tokens of the text")
    return parser.parse_args()


def value(text: str) -> object:
    """`3`, `true` and `["Q4_K_M"]` as what they are; anything else is text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return tuple(found) if isinstance(found, list) else found


def quantize(model: Path, output: Path, method: str, options: dict) -> float:
    """Write it; CPU seconds of the loop."""
    request = job.Request(
        source=str(model),
        method=method,
        options=methods.load(method).Options(**options),
        calibration=CalibrationOptions(),
        run=RunOptions(threads=1),
        output=output,
    )
    prepared = job.prepare(request, Progress())
    before = time.process_time()
    loop.run(prepared, Progress())
    return time.process_time() - before


def main() -> None:
    args = parse()
    asked = {name: value(text) for name, _, text in (one.partition("=") for one in args.set)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        twin = outlier_twin.make(args.model, Path(folder) / "twin")
        for label, model in (("model", args.model), ("twin", twin)):
            made, seconds, names = [], [], args.transforms.split(",")
            for name in names:
                end = ".gguf" if args.method == "gguf" else ""
                output = Path(folder) / f"{label}-{name}{end}"
                seconds.append(quantize(model, output, args.method, asked | {"transform": name}))
                made.append(open_checkpoint(str(output)))
            base = open_checkpoint(str(model))
            windows = windows_of.load(base, args.text, 256, None, args.limit)
            found = evaluate.evaluate([base, *made], windows, torch.float32, torch.device("cpu"))
            for name, cpu, result in zip(names, seconds, found.results[1:], strict=True):
                rows.append([label, name, f"{result.metrics.kld.mean:.5f}", f"{cpu:.1f}"])
    print(table(["", "transform", "KL divergence", "CPU seconds"], rows))


if __name__ == "__main__":
    main()
