"""Regenerate the GGUF tables of docs/measurements.md: error feedback against llama-quantize, same bytes.

    python scripts/results_gguf.py [MODEL ...] [--text TEXT] [--ctx 256] [--limit 10240]
                                   [--i-quants] [--write]

For every type two files are made of MODEL (the bundled demo model unless given), by `--solver rtn` with an
importance matrix, whose bytes are llama-quantize's, and by `--solver gptq`. The KL divergence to the
original is measured twice: of the decoded weights in float32 (`quantkit eval`), and as llama.cpp computes
it, whose kernels round the activations, too: what its F16 file has is the floor there. Needs the xllamacpp
package. Fails if a type is not as much better as LIMITS or CODE_BOOKS says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from client_runs import ROOT, quantkit, write_section
from transformers import AutoModelForCausalLM

from quantkit.evaluation import windows as windows_of
from quantkit.models.files.open import open_checkpoint

sys.path.insert(0, str(ROOT / "tests"))
from llama_cpp import Llama  # noqa: E402

LIMITS = {  # type -> KL divergence with error feedback, at most so many times that with the imatrix encoder
    "Q2_K": 0.6,
    "Q3_K_M": 0.6,
    "Q4_0": 1.0,
    "IQ4_NL": 1.0,
    "IQ4_XS": 1.0,
    "Q4_K_M": 0.6,
    "Q5_K_M": 0.6,
    "Q6_K": 1.0,
    "Q8_0": 1.0,
}
CODE_BOOKS = {  # the i-quants of 2 and 3 bits, which take longer
    "IQ2_XXS": 0.7,
    "IQ2_XS": 0.6,
    "IQ2_S": 0.6,
    "IQ2_M": 0.6,
    "IQ3_XXS": 0.6,
    "IQ3_XS": 0.6,
    "IQ3_S": 0.6,
    "IQ3_M": 0.6,
}
SOLVERS = ("rtn", "gptq")


def make(model: str, folder: Path, names: Iterable[str]) -> list[Path]:
    """The F16 file and two of each type."""
    types = [flag for name in names for flag in ("-t", name)]
    for solver in SOLVERS:
        quantkit("gguf", model, *types, "--solver", solver, "-o", str(folder / solver))
    quantkit("gguf", model, "-t", "F16", "-o", str(folder / "F16.gguf"))
    stem = Path(model).name
    return [
        folder / "F16.gguf",
        *(folder / solver / f"{stem}-{name}.gguf" for name in names for solver in SOLVERS),
    ]


def decoded(model: str, files: list[Path], args: argparse.Namespace) -> dict[Path, dict]:
    """What `quantkit eval` says of every file."""
    options = [
        "--text",
        str(args.text),
        "--ctx",
        str(args.ctx),
        "--limit",
        str(args.limit),
        "--json",
    ]
    record = json.loads(quantkit("eval", model, *map(str, files), *options))
    return dict(zip(files, record["models"][1:], strict=True))


def computed(model: str, files: list[Path], args: argparse.Namespace) -> dict[Path, float]:
    """KL divergence of every file from the original as llama.cpp computes it, over the same tokens."""
    windows = windows_of.load(open_checkpoint(model), args.text, args.ctx, None, args.limit)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [original(ids[None]).logits[0].log_softmax(-1) for ids in windows.ids]
    found = {}
    for path in files:
        divergences = []
        with Llama(path, ctx=args.ctx) as llama:
            for ids, first, wanted in zip(windows.ids, windows.first, expected, strict=True):
                log_probs = torch.from_numpy(llama.logits(ids.tolist())).log_softmax(-1)
                wanted, log_probs = wanted[first:-1], log_probs[first:-1]
                divergences.append((wanted.exp() * (wanted - log_probs)).sum(-1))
        found[path] = torch.cat(divergences).mean().item()
    return found


def table(model: str, limits: dict[str, float], args: argparse.Namespace) -> tuple[str, list[str]]:
    """Markdown for one model, and the types that miss their limit."""
    lines = [
        "| type | MB | KL: imatrix | KL: gptq | ratio | in llama.cpp: imatrix | gptq | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        files = make(model, Path(folder), limits)
        theirs, ours = computed(model, files, args), decoded(model, files, args)
        kld = {path: row["metrics"]["kld"]["mean"] for path, row in ours.items()}
        for rtn, gptq, (name, limit) in zip(files[1::2], files[2::2], limits.items(), strict=True):
            assert ours[rtn]["size"]["weight_bytes"] == ours[gptq]["size"]["weight_bytes"]
            megabytes = ours[gptq]["size"]["weight_bytes"] / 1e6
            parts = [f"{of[rtn]:.5f} | {of[gptq]:.5f} | {of[gptq] / of[rtn]:.2f}" for of in (kld, theirs)]
            lines.append(f"| {name} | {megabytes:.2f} | {' | '.join(parts)} |")
            if kld[gptq] > limit * kld[rtn]:
                missed.append(f"{Path(model).name} {name}: {kld[gptq] / kld[rtn]:.2f} of {limit}")
        floor = f"{theirs[files[0]]:.5f}"
    lines.append(f"\n{Path(model).name}, {args.text.name}, context {args.ctx}, first {args.limit} tokens. ")
    lines[-1] += f"llama.cpp's F16 file has {floor}."
    return "\n".join(lines) + "\n", missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(ROOT / "tests/data/demo-llama-6m")])
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=10240)
    parser.add_argument("--i-quants", action="store_true", help="those of 2 and 3 bits, a table of their own")
    parser.add_argument("--write", action="store_true", help="put the tables where they belong")
    args = parser.parse_args()
    texts, missed = [], []
    for model in args.models:
        text, short = table(model, CODE_BOOKS if args.i_quants else LIMITS, args)
        print(text, flush=True)
        texts.append(text)
        missed += short
    if args.write:
        write_section(
            "i-quants" if args.i_quants else "gguf", "\n".join(texts), ROOT / "docs/measurements.md"
        )
    if missed:
        sys.exit(f"not as much better as it should be: {', '.join(missed)}")


if __name__ == "__main__":
    main()
