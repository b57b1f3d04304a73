"""What all tables of loss share: a job, its evaluation, and a table of every metric."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import common
from common import ROOT, quantkit, table, write_section

MEASUREMENTS = ROOT / "docs/measurements"
GPTQ = {  # name of a row -> command
    f"{solver} {bits} bit": f"gptq --bits {bits} --solver {solver}"
    for bits in (8, 4, 3, 2)
    for solver in ("gptq", "rtn")
}
AWQ = {"awq 4 bit": "awq", "awq gptq 4 bit": "awq --solver gptq"}


def show(args: argparse.Namespace, marker: str, text: str, document: Path) -> None:
    """Print a table, or put it between its markers."""
    write_section(marker, text, document) if args.write else print(text, flush=True)


def quantize(model: str, folder: Path, name: str, command: str, *flags: object) -> Path:
    """Run one job unless its output is there; return the output."""
    method, *options = command.split()
    output = folder / (re.sub(r"\W+", "-", name) + (".gguf" if method == "gguf" else ""))
    if not output.exists():
        quantkit(method, model, "-o", output, *options, *flags)
        print(f"{name} done", file=sys.stderr, flush=True)
    return output


def evaluated(model: str, copies: Iterable[object], args: argparse.Namespace) -> dict:
    """Return the record of a model and its quantized copies on the text of the command line."""
    return common.evaluated(model, copies, args.text, args.ctx, args.limit)


def divergences(record: dict) -> list[float]:
    """Return the KL divergence of each model but the first."""
    return [model["metrics"]["kld"]["mean"] for model in record["models"][1:]]


def every_metric(record: dict, names: list[str]) -> str:
    """Return Markdown of an evaluation record; names label its models in order."""
    rows = []
    for name, model in zip(names, record["models"], strict=True):
        metrics, size = model["metrics"], model["size"]
        rows.append([name, f"{size['weight_bytes'] / 1e6:.2f} MB", f"{size['bits_per_weight']:.2f}"])
        rows[-1].append(f"{metrics['ppl']['value']:.2f} ± {metrics['ppl']['stderr']:.2f}")
        rows[-1].append(f"{metrics['nll']['value']:.4f} ± {metrics['nll']['stderr']:.4f}")
        rows[-1].append(f"{metrics['kld']['mean']:.5f}" if metrics["kld"] else "–")
    data = record["data"]
    return (
        table(["", "size", "model bits", "perplexity", "nll", "KL divergence"], rows, left=1)
        + f"\n{data['text']} (sha256 {data['sha256'][:12]}): {data['tokens']} tokens, context {data['ctx']}, "
        f"stride {data['stride']}, {data['dtype']}.\n"
    )
