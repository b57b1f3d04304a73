"""Loss of every method at default options, and of some on the twin with outlier channels."""

from __future__ import annotations

import argparse
from pathlib import Path

from common import ROOT, outlier_twin, quantkit, table, write_section
from loss.jobs import AWQ, GPTQ, MEASUREMENTS, divergences, evaluated, every_metric, quantize, show

YAQA = {f"{bits} bit, yaqa": f"gptq --bits {bits} --solver yaqa" for bits in (4, 3, 2)}
SHIPPED = {name: command for name, command in GPTQ.items() if name.startswith("gptq") and "8" not in name}
OWN = {f"{name}, own text": command for name, command in (SHIPPED | YAQA).items()}
METHODS = GPTQ | {"int8": "int8", "nf4": "nf4", "nf4 gptq": "nf4 --solver gptq"} | AWQ | YAQA | OWN
TWIN = {
    "int8": "int8",
    "int8, threshold 0": "int8 --threshold 0",
    "rtn 4 bit": GPTQ["rtn 4 bit"],
    "gptq 4 bit": GPTQ["gptq 4 bit"],
    **AWQ,
    **{name: command for name, command in (YAQA | OWN).items() if name.startswith("4 bit")},
}
# (better, worse, factor): the KL divergence of the first is at most factor times that of the second
CLAIMS = {
    "every": [
        *((f"gptq {bits} bit", f"rtn {bits} bit", 1.0) for bits in (8, 4, 3, 2)),
        *((f"{bits} bit, yaqa", f"gptq {bits} bit", 0.95) for bits in (4, 3, 2)),
        *((f"{name}, own text", name, 0.9) for name in YAQA),
        ("nf4 gptq", "nf4", 0.6),
        ("awq 4 bit", "rtn 4 bit", 1.0),
        ("awq gptq 4 bit", "awq 4 bit", 1.0),
    ],
    "outliers": [("int8", "int8, threshold 0", 0.2), ("awq 4 bit", "rtn 4 bit", 1.0)],
}


SIZE = ("--samples", 128, "--seqlen", 512)  # of own text: as much as of the shipped text


def own_text(model: str, folder: Path) -> list:
    """Return the flags of calibration on text that the model writes the first time."""
    text = folder / "own.jsonl"
    if not text.exists():
        quantkit("sample", model, "-o", text, "--dtype", "float32", *SIZE)
    return ["--calibration", text, *SIZE]


def own_table(divergence: dict[str, float]) -> str:
    """Return Markdown: what own text gains."""
    rows = []
    for name in OWN:
        shipped = name.removesuffix(", own text")
        before, after = divergence[shipped], divergence[name]
        rows.append([shipped, f"{before:.5f}", f"{after:.5f}", f"{after / before - 1:+.0%}"])
    return table(["", "KL: shipped text", "KL: own text", "change"], rows, left=1)


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    missed = []
    twin = outlier_twin(Path(args.models[0]), folder / "twin")
    for marker, model, jobs in (("every", args.models[0], METHODS), ("outliers", str(twin), TWIN)):
        outputs = folder / marker
        outputs.mkdir(exist_ok=True)
        copies = [
            quantize(model, outputs, name, command, *(own_text(model, outputs) if name in OWN else ()))
            for name, command in jobs.items()
        ]
        record = evaluated(model, copies, args)
        kld = dict(zip(jobs, divergences(record), strict=True))
        show(args, marker, every_metric(record, ["original", *jobs]), MEASUREMENTS / "quality.md")
        if args.write and marker == "every":
            write_section("own", own_table(kld), ROOT / "docs/sample.md")
        for better, worse, factor in CLAIMS[marker]:
            if not kld[better] <= factor * kld[worse]:
                missed.append(f"{better} is above {factor:g} of {worse}")
    return missed
