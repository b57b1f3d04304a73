"""Regenerate the README's results table: gptq and rtn at 8, 4, 3 and 2 bits against the original.

    python scripts/results.py [MODEL] [--text TEXT] [--ctx 256] [--limit N] [--write README.md]

Quantizes MODEL (the bundled demo model unless given) eight times with groups of 128 and default
options, evaluates all in one protocol, and prints a Markdown table. `--write` puts it between the
README's results markers. Fails if gptq does not beat rtn: in KL divergence in every row, and in nll
by more than two standard errors at 3 and 2 bits.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

from quantkit import evaluate, job, pipeline, plan
from quantkit.checkpoint import Checkpoint
from quantkit.methods.gptq import Options
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.progress import Progress

ROOT = Path(__file__).parent.parent
MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)


def quantize(model: str, output: Path, solver: str, bits: int) -> str:
    """One job with default options; returns the folder written."""
    request = job.Request(
        source=model,
        method="gptq",
        options=Options(bits=bits, solver=solver),
        calibration=CalibrationOptions(),
        run=RunOptions(),
        output=output / f"{solver}-w{bits}",
    )
    pipeline.run(job.prepare(request, Progress()), Progress())
    print(f"{solver} {bits} bit done", file=sys.stderr)
    return str(request.output)


def table(record: dict, names: list[str]) -> str:
    """Markdown of an evaluation record; names label its models in order."""
    lines = [
        "| | size | bits/weight | perplexity | nll | KL divergence |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, model in zip(names, record["models"], strict=True):
        metrics, size = model["metrics"], model["size"]
        kld = "–" if metrics["kld"]["mean"] is None else f"{metrics['kld']['mean']:.5f}"
        lines.append(
            f"| {name} | {size['weight_bytes'] / 1e6:.2f} MB | {size['bits_per_weight']:.2f} "
            f"| {metrics['ppl']['value']:.2f} ± {metrics['ppl']['stderr']:.2f} "
            f"| {metrics['nll']['value']:.4f} ± {metrics['nll']['stderr']:.4f} | {kld} |"
        )
    data = record["data"]
    lines.append(
        f"\n{data['text']} (sha256 {data['sha256'][:12]}): {data['tokens']} tokens, context {data['ctx']}, "
        f"stride {data['stride']}, {data['dtype']}."
    )
    return "\n".join(lines) + "\n"


def check(results: list[evaluate.Result], names: list[str]) -> list[str]:
    """What the table should show and does not."""
    metrics = {name: result.metrics for name, result in zip(names, results, strict=True)}
    failures = []
    for bits in (8, 4, 3, 2):
        ours, base = metrics[f"gptq {bits} bit"], metrics[f"rtn {bits} bit"]
        if ours.kld >= base.kld:
            failures.append(f"{bits} bit: gptq's KL {ours.kld:.4f} is not below rtn's {base.kld:.4f}")
        if bits < 4 and base.nll - ours.nll <= 2 * max(ours.nll_stderr, base.nll_stderr):
            failures.append(f"{bits} bit: gptq's nll is not two standard errors below rtn's")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/demo-llama-6m"))
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    jobs = [(solver, bits) for bits in (8, 4, 3, 2) for solver in ("gptq", "rtn")]
    names = ["original", *(f"{solver} {bits} bit" for solver, bits in jobs)]
    with tempfile.TemporaryDirectory() as folder:
        made = [quantize(args.model, Path(folder), solver, bits) for solver, bits in jobs]
        checkpoints = [Checkpoint.open(source) for source in (args.model, *made)]
        windows = evaluate.load_windows(checkpoints[0], args.text, args.ctx, None, args.limit)
        dtype = torch.float32
        results = evaluate.evaluate(checkpoints, windows, dtype, plan.choose_device("auto"))
    text = table(evaluate.record(windows, dtype, results), names)
    print(text)
    if args.write:
        readme = args.write.read_text()
        assert MARKERS.search(readme), f"{args.write} has no results markers"
        args.write.write_text(MARKERS.sub(lambda found: found[1] + text + found[2], readme))
    failures = check(results, names)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
