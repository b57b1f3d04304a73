"""Loss of GGUF types in the same bytes: error feedback against encoding with an importance matrix."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common import ROOT, quantkit, table
from loss.jobs import MEASUREMENTS, divergences, evaluated, show

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
CODE_BOOKS = {"IQ2_XXS": 0.7} | dict.fromkeys(
    ("IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M"), 0.6
)  # the i-quants of 2 and 3 bits, which take longer
SOLVERS = ("rtn", "gptq")
HEAD = ["type", "MB"]
HEAD += [f"{by}, {of}" for by in ("eval", "llama.cpp") for of in ("KL: imatrix", "KL: gptq", "ratio")]


def computed(model: str, files: list[Path], args: argparse.Namespace) -> dict[Path, float]:
    """Return the KL divergence of every file from the original as llama.cpp computes, on the same tokens."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    from quantkit.evaluation import windows as windows_of
    from quantkit.models.files.open import open_checkpoint

    windows = windows_of.load(open_checkpoint(model), args.text, args.ctx, None, args.limit)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [original(ids[None]).logits[0].log_softmax(-1) for ids in windows.ids]
    divergence = {}
    for path in files:
        terms = []
        with Llama(path, ctx=args.ctx) as llama:
            for ids, first, wanted in zip(windows.ids, windows.first, expected, strict=True):
                log_probs = torch.from_numpy(llama.logits(ids.tolist())).log_softmax(-1)
                wanted, log_probs = wanted[first:-1], log_probs[first:-1]
                terms.append((wanted.exp() * (wanted - log_probs)).sum(-1))
        divergence[path] = torch.cat(terms).mean().item()
    return divergence


def rows_of(
    model: str, folder: Path, limits: dict[str, float], args: argparse.Namespace
) -> tuple[list[list[str]], float, list[str]]:
    """Return a row for each type, the divergence of llama.cpp's F16 file, and types that miss their limit."""
    types = [flag for name in limits for flag in ("-t", name)]
    for solver in SOLVERS:
        quantkit("gguf", model, *types, "--solver", solver, "-o", folder / solver, "--overwrite")
    floor = folder / "F16.gguf"
    quantkit("gguf", model, "-t", "F16", "-o", floor, "--overwrite")
    stem = Path(model).name
    pairs = {name: [folder / solver / f"{stem}-{name}.gguf" for solver in SOLVERS] for name in limits}
    files = [file for pair in pairs.values() for file in pair]
    by_llama, record = computed(model, [floor, *files], args), evaluated(model, files, args)
    by_eval = dict(zip(files, divergences(record), strict=True))
    size = {file: row["size"]["weight_bytes"] for file, row in zip(files, record["models"][1:], strict=True)}
    rows, missed = [], []
    for name, (rtn, gptq) in pairs.items():
        assert size[rtn] == size[gptq]
        rows.append([name, f"{size[gptq] / 1e6:.2f}"])
        for kld in (by_eval, by_llama):
            rows[-1] += [f"{kld[rtn]:.5f}", f"{kld[gptq]:.5f}", f"{kld[gptq] / kld[rtn]:.2f}"]
        if by_eval[gptq] > limits[name] * by_eval[rtn]:
            missed.append(f"{stem} {name}: {by_eval[gptq] / by_eval[rtn]:.2f} of {limits[name]}")
    return rows, by_llama[floor], missed


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    texts, missed = [], []
    for number, model in enumerate(args.models):
        outputs = folder / str(number)
        outputs.mkdir(exist_ok=True)
        rows, floor, short = rows_of(model, outputs, CODE_BOOKS if args.i_quants else LIMITS, args)
        note = f"\n{Path(model).name}, {args.text.name}, context {args.ctx}, first {args.limit} tokens. "
        texts.append(table(HEAD, rows, left=1) + note + f"llama.cpp's F16 file has {floor:.5f}.\n")
        missed += short
    show(args, "i-quants" if args.i_quants else "gguf", "\n".join(texts), MEASUREMENTS / "gguf.md")
    return missed
