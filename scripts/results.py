"""Regenerate the README's results table: every method against the original, in one protocol.

    python scripts/results.py [MODEL] [--text TEXT] [--ctx 256] [--limit N] [--write]

Quantizes MODEL (the bundled demo model unless given) with every method at its default options, evaluates
all, and prints a Markdown table; `--write` puts it into docs/measurements.md and some of its rows into
README.md. Then the same for a twin of the model with outlier channels (outlier_twin.py), where the order of
the methods turns. Fails if a table does not show what is said of it there (see `CLAIMS`).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import outlier_twin
import torch
from client_runs import ROOT, write_section

from quantkit.evaluation import evaluate, self_text
from quantkit.evaluation import windows as windows_of
from quantkit.evaluation.comparison import record as records
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, loop, methods
from quantkit.quantize.progress import Progress

Job = tuple[str, dict]  # method, options
RUN, CALIBRATION = RunOptions(), CalibrationOptions()
GPTQ = {
    f"{solver} {bits} bit": ("gptq", {"bits": bits, "solver": solver})
    for bits in (8, 4, 3, 2)
    for solver in ("gptq", "rtn")
}
BEST = {  # what takes more time
    f"{bits} bit, yaqa, target original": (
        "gptq",
        {"bits": bits, "solver": "yaqa", "target": "original"},
    )
    for bits in (4, 3, 2)
}
OWN = {  # calibrated on text that the model writes itself
    f"{name}, own text": made
    for name, made in [*((f"gptq {bits} bit", GPTQ[f"gptq {bits} bit"]) for bits in (4, 3, 2)), *BEST.items()]
}
OTHERS = {
    "int8": ("int8", {}),
    "nf4": ("nf4", {}),
    "nf4 gptq": ("nf4", {"solver": "gptq"}),
    "awq 4 bit": ("awq", {}),
    "awq gptq 4 bit": ("awq", {"solver": "gptq"}),
}
TWIN = {
    "int8": ("int8", {}),
    "int8, threshold 0": ("int8", {"threshold": 0.0}),
    "rtn 4 bit": GPTQ["rtn 4 bit"],
    "gptq 4 bit": GPTQ["gptq 4 bit"],
    "awq 4 bit": OTHERS["awq 4 bit"],
    "awq gptq 4 bit": OTHERS["awq gptq 4 bit"],
    **{name: made for name, made in (BEST | OWN).items() if name.startswith("4 bit")},
}
README = (
    "original",
    "rtn 4 bit",
    "gptq 4 bit",
    "nf4 gptq",
    "gptq 3 bit",
    "4 bit, yaqa, target original, own text",
)
# (better, worse, factor): the KL divergence of the first is at most factor times that of the second
CLAIMS = {
    "every": [
        *((f"gptq {bits} bit", f"rtn {bits} bit", 1.0) for bits in (8, 4, 3, 2)),
        *((f"{bits} bit, yaqa, target original", f"gptq {bits} bit", 0.9) for bits in (4, 3, 2)),
        *((f"{name}, own text", name, 0.9) for name in BEST),
        ("nf4 gptq", "nf4", 0.6),
        ("awq 4 bit", "rtn 4 bit", 1.0),
        ("awq gptq 4 bit", "awq 4 bit", 1.0),
    ],
    "outliers": [("int8", "int8, threshold 0", 0.2), ("awq 4 bit", "rtn 4 bit", 1.0)],
}


def quantize(
    model: str,
    output: Path,
    name: str,
    made: Job,
    run: RunOptions = RUN,
    calibration: CalibrationOptions = CALIBRATION,
) -> str:
    """One job; returns the folder or file written."""
    method, options = made
    request = job.Request(
        source=model,
        method=method,
        options=methods.load(method).Options(**options),
        calibration=calibration,
        run=run,
        output=output / (re.sub(r"\W+", "-", name) + (".gguf" if method == "gguf" else "")),
    )
    loop.run(job.prepare(request, Progress()), Progress())
    print(f"{name} done", file=sys.stderr)
    return str(request.output)


def measure(model: str, jobs: dict[str, Job], args: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """The Markdown table of the model and what the jobs make of it, and the KL divergence of each."""
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name, one in jobs.items():
            text = own_text(model, Path(folder)) if name in OWN else CALIBRATION
            made[name] = quantize(model, Path(folder), name, one, calibration=text)
        record = compare(model, made.values(), args)
    return table(record, ["original", *jobs]), divergences(record, made)


def own_text(model: str, folder: Path) -> CalibrationOptions:
    """As many sequences as of the shipped text, written by the model the first time that it is asked."""
    output = folder / "own.jsonl"
    if not output.exists():
        self_text.write(
            open_checkpoint(model), self_text.Settings(), output, torch.float32, choose_device("auto")
        )
    return CalibrationOptions(str(output), seqlen=self_text.Settings.seqlen)


def compare(model: str, made: Iterable[str], args: argparse.Namespace) -> dict:
    """The record of an evaluation of the model and what was made of it."""
    checkpoints = [open_checkpoint(source) for source in (model, *made)]
    windows = windows_of.load(checkpoints[0], args.text, args.ctx, None, args.limit)
    device, chosen = choose_device("auto"), frozenset({"kld"})
    measured = evaluate.evaluate(checkpoints, windows, torch.float32, device, chosen=chosen)
    return records.record(windows.protocol, torch.float32, device, measured, chosen)


def divergences(record: dict, names: Iterable[str]) -> dict[str, float]:
    """KL divergence of each model but the first, by the names given."""
    return dict(zip(names, (model["metrics"]["kld"]["mean"] for model in record["models"][1:]), strict=True))


def table(record: dict, names: list[str]) -> str:
    """Markdown of an evaluation record; names label its models in order."""
    lines = [
        "| | size | bits/weight | perplexity | nll | KL divergence |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, model in zip(names, record["models"], strict=True):
        metrics, size = model["metrics"], model["size"]
        kld = f"{metrics['kld']['mean']:.5f}" if metrics["kld"] else "–"
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


def some(text: str) -> str:
    """The table with the rows of the README only."""
    rows = text.splitlines(keepends=True)
    return "".join(
        row for row in rows if not row.startswith("| ") or row.split(" | ")[0][2:] in ("", "---", *README)
    )


def own_table(divergence: dict[str, float]) -> str:
    """Markdown: what the text is worth, by itself."""
    lines = ["| | shipped text | own text | |", "| --- | ---: | ---: | ---: |"]
    for name in OWN:
        shipped = name.removesuffix(", own text")
        before, after = divergence[shipped], divergence[name]
        lines.append(f"| {shipped} | {before:.5f} | {after:.5f} | {after / before - 1:+.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/demo-llama-6m"))
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--write", action="store_true", help="put the tables where they belong")
    args = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        twin = outlier_twin.make(Path(args.model), Path(folder) / "twin")
        for marker, document, model, jobs in (
            ("every", ROOT / "docs/measurements.md", args.model, GPTQ | OTHERS | BEST | OWN),
            ("outliers", ROOT / "docs/measurements.md", str(twin), TWIN),
        ):
            text, divergence = measure(model, jobs, args)
            if args.write:
                write_section(marker, text, document)
            if args.write and marker == "every":
                write_section("results", some(text), ROOT / "README.md")
                write_section("own", own_table(divergence), ROOT / "docs/sample.md")
            else:
                print(text)
            for better, worse, factor in CLAIMS[marker]:
                if not divergence[better] <= factor * divergence[worse]:
                    failures.append(f"{better} is above {factor:g} of {worse}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
