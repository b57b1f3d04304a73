"""Regenerate the table of docs/auto.md: what a search finds, against uniform presets of the same bytes.

    python scripts/results_auto.py [MODEL ...] [--text TEXT] [--ctx 256] [--limit N] [--samples 128]
                                   [--only ENGINE] [--write]

For every engine and every preset of PRESETS, `quantkit auto` is given the bits of that preset; the best
uniform preset of that size is what it compares with. GGUF files are compared with llama-quantize's, too: the
same types by its own encoder with an importance matrix (`--solver rtn`, byte for byte). Both are measured on
TEXT, on which nothing is chosen. Says which targets are missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from client_runs import ROOT, write_section

PRESETS = {  # engine and further flags -> presets whose bits are the budgets
    ("transformers",): ("3 bit g128", "3 bit g64", "3 bit g32"),
    ("any", "--no-sym"): ("3 bit g128",),
    ("llama.cpp",): ("Q2_K", "Q3_K_M", "Q4_K_M"),
}
UNIFORM, IMATRIX = 0.7, 0.5  # of the uniform preset's divergence, and of the imatrix file's, at most


def quantkit(*arguments: str) -> str:
    """Run a command; its standard output."""
    command = [sys.executable, "-m", "quantkit", *arguments, "--quiet"]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def imatrix(model: str, name: str, folder: Path, args: argparse.Namespace) -> float:
    """KL divergence of llama-quantize's file of this type."""
    place = str(folder / f"{name}.gguf")
    samples = ["--samples", str(args.samples)]
    quantkit("gguf", model, "-t", name, "--solver", "rtn", "-o", place, *samples, "--overwrite")
    text = ["--text", str(args.text), "--ctx", str(args.ctx), "--limit", str(args.limit)]
    record = json.loads(quantkit("eval", model, place, *text, "--json"))
    return record["models"][1]["metrics"]["kld"]["mean"]


def rows(model: str, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Lines of the table, and the targets that are missed."""
    found, missed = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for (engine, *more), presets in PRESETS.items():
            if args.only not in (None, engine):
                continue
            output = str(folder / "out") + (".gguf" if engine == "llama.cpp" else "")
            common = ["auto", model, "--engine", engine, *more, "-o", output, "--samples", str(args.samples)]
            common += ["--search-tokens", str(args.search_tokens), "--json", "--overwrite"]
            common += ["--text", str(args.text), "--ctx", str(args.ctx), "--limit", str(args.limit)]
            common += ["--sensitivities", str(folder / f"{engine}.json")]
            bits = json.loads(quantkit(*common, "--bpw", "4", "--dry-run"))["presets"]
            for preset in presets:
                record = json.loads(quantkit(*common, "--bpw", repr(bits[preset] * (1 + 1e-9))))
                searched, uniform = record["searched"], record["uniform"]
                other = imatrix(model, preset, folder, args) if engine == "llama.cpp" else None
                ratio = searched["kld"] / uniform["kld"]
                line = f"| {Path(model).name} | {' '.join([engine, *more])} | {preset} | {bits[preset]:.3f} "
                line += f"| {uniform['predicted_kld']:.5f} | {uniform['kld']:.5f} "
                line += f"| {searched['predicted_kld']:.5f} | {searched['kld']:.5f} | {ratio:.2f} "
                line += f"| {other:.5f} | {searched['kld'] / other:.2f} |" if other else "| | |"
                print(line, flush=True)
                found.append(line)
                if other and searched["kld"] > IMATRIX * other:
                    missed.append(f"{Path(model).name} {preset}: {searched['kld'] / other:.2f} of imatrix")
                if not other and ratio > UNIFORM:
                    missed.append(f"{Path(model).name} {engine} {preset}: {ratio:.2f} of uniform")
    return found, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(ROOT / "tests/data/demo-llama-6m")])
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=10240)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--search-tokens", type=int, default=4096)
    parser.add_argument("--only", help="one engine alone")
    parser.add_argument("--write", action="store_true", help="put the table where it belongs")
    args = parser.parse_args()
    lines = [
        "| model | engine | size of | bits/weight | uniform: predicted | measured | searched: predicted "
        "| measured | ratio | imatrix | ratio |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    missed = []
    for model in args.models:
        found, short = rows(model, args)
        lines += found
        missed += short
    lines.append(f"\n{args.text.name}, context {args.ctx}, first {args.limit} tokens.")
    if args.write:
        write_section("auto", "\n".join(lines) + "\n", ROOT / "docs/auto.md")
    if missed:
        sys.exit(f"targets missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
