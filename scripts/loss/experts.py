"""Loss of a mixture by `--experts` choice, by ever fewer calibration tokens, and as GGUF files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import ROOT, table
from loss import gguf
from loss.jobs import AWQ, GPTQ, divergences, evaluated, every_metric, quantize, show

CHOICES = ("routed", "all", "shrink")
FEW = (64, 16, 4, 1)  # calibration sequences, at 3 bits: differences show earlier
DOCUMENT = ROOT / "docs/experts.md"


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    (model, *_) = args.models
    jobs = {f"rtn {bits} bit": GPTQ[f"rtn {bits} bit"] for bits in (4, 3)} | {
        f"gptq {bits} bit, --experts {choice}": f"{GPTQ[f'gptq {bits} bit']} --experts {choice}"
        for bits in (4, 3)
        for choice in CHOICES
    }
    jobs |= AWQ
    copies = [quantize(model, folder, name, command) for name, command in jobs.items()]
    record = evaluated(model, copies, args)
    show(args, "mixture", every_metric(record, ["original", *jobs]), DOCUMENT)
    kld = dict(zip(jobs, divergences(record), strict=True))
    missed = [f"{n} bit" for n in (4, 3) if kld[f"gptq {n} bit, --experts shrink"] > kld[f"rtn {n} bit"]]
    missed += starved(args, model, folder)
    args.limit = args.limit or 10240
    rows, _, _ = gguf.rows_of(model, folder, {"Q4_K_M": 1.0, "Q3_K_M": 1.0}, args)
    rows = [[row[0], *row[2:]] for row in rows]
    show(args, "mixture-gguf", table([gguf.HEAD[0], *gguf.HEAD[2:]], rows, left=1), DOCUMENT)
    return [f"--experts shrink is above what it has to beat: {where}" for where in missed]


def starved(args: argparse.Namespace, model: str, folder: Path) -> list[str]:
    """Show the loss by fewer and fewer tokens; return where shrinking is no better than the other choices."""
    rows, missed = [], []
    for samples in FEW:
        copies = {
            choice: quantize(
                model, folder, f"{choice} by {samples}", GPTQ["gptq 3 bit"], "--experts", choice,
                "--samples", samples,
            )
            for choice in CHOICES
        }  # fmt: skip
        kld = dict(zip(copies, divergences(evaluated(model, copies.values(), args)), strict=True))
        manifest = json.loads((copies["routed"] / "quantkit.json").read_text())
        tokens = sorted(row["tokens"] for row in manifest["linears"] if row.get("tokens") is not None)
        rows.append([str(samples), f"{tokens[0]}, {tokens[len(tokens) // 2]}"])
        rows[-1] += [f"{value:.4f}" for value in kld.values()]
        if kld.pop("shrink") >= max(kld.values()):
            missed.append(f"{samples} sequences")
    head = ["sequences of 512", "tokens of an expert: least, median", *CHOICES]
    show(args, "starved", table(head, rows, left=0), DOCUMENT)
    return missed
