"""Loss of compressed students before and after 128 sequences of their teacher."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import ROOT, quantkit, table
from loss.jobs import GPTQ, divergences, evaluated, quantize, show

STUDENTS = {  # row -> command, and the share of the KL divergence that may be left, at most
    "gptq 4 bit": (GPTQ["gptq 4 bit"], 1.0),
    "gptq 3 bit": (GPTQ["gptq 3 bit"], 0.95),
    "gptq 2 bit": (GPTQ["gptq 2 bit"], 0.9),
    "nf4": ("nf4", 1.0),
    "Q4_K_M": ("gguf -t Q4_K_M", 1.0),
    "Q3_K_M": ("gguf -t Q3_K_M", 1.0),
}
STAGES = "held-out KL: before → after stage 1 → after stage 2"


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    (model, *_), rows, missed = args.models, [], []
    for name, (command, share) in STUDENTS.items():
        if args.only not in name:
            continue
        student = quantize(model, folder, name, command)
        out = student.with_stem(f"{student.stem}-distilled")
        report = folder / f"{out.stem}.json"
        if not out.exists() or not report.exists():
            again = "--resume" if Path(f"{out}.partial").exists() else "--overwrite"
            options = ["-o", out, "--samples", args.samples, "--seqlen", "256", again, "--json"]
            report.write_text(quantkit("distill", model, student, *options))
        record = json.loads(report.read_text())
        measured = evaluated(model, [student, out], args)
        size, grown = (row["size"]["weight_bytes"] for row in measured["models"][1:])
        before, after = divergences(measured)
        stages = [f"{stage['after' if stage['kept'] else 'before']:.5f}" for stage in record["stages"]]
        rows.append([name, f"{size / 1e6:.2f} MB", f"{before:.5f}", f"{after:.5f}"])
        rows[-1] += [f"{after / before - 1:+.1%}", " → ".join([f"{record['before']:.5f}", *stages])]
        if grown != size or not after <= share * before:
            missed.append(f"{name}: {after:.5f} of {before:.5f}, {grown} bytes of {size}")
    head = ["student", "size", "KL before", "KL after", "change", STAGES]
    show(args, "distilled", table(head, rows, left=1), ROOT / "docs/distill.md")
    return missed
