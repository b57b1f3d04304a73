"""Regenerate the tables of docs/experts.md: what compression costs a trained mixture of experts.

    python scripts/results_experts.py [MODEL] [--text TEXT] [--ctx 256] [--limit N] [--write]

Quantizes MODEL (the bundled mixture unless given) to 4 and 3 bits with each `--experts` choice, to 4 bits
with awq, and to two GGUF types with error feedback and with llama-quantize's encoder and importance matrix.
Then again by fewer and fewer calibration tokens, where experts starve: `rtn` there is a fourth choice, which
rounds an expert to nearest whose tokens are fewer than its inputs. Fails if the default is above rounding to
nearest, or the worst of the choices, anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import results
import results_gguf
import torch
from client_runs import ROOT, write_section

from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.calibrate import measure

CHOICES = ("routed", "all", "shrink")
FEW = (64, 16, 4, 1)  # calibration sequences
BITS = 3  # of the comparison by few tokens: differences show earlier
TYPES = ("Q4_K_M", "Q3_K_M")


def starved_rounded(own, layer, in_features, choice):
    """`measure.of_expert` of the fourth choice: without second moments, error feedback is rounding."""
    if own.tokens >= in_features:
        return own
    even = torch.eye(in_features, device=layer.hessian.device) * layer.hessian.diagonal().mean()
    return measure.replace(own, hessian=even)


def widths(model: str, args: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Table of every method at 4 and 3 bits."""
    jobs = {f"rtn {bits} bit": (results.GPTQ[f"rtn {bits} bit"], "shrink") for bits in (4, 3)}
    for bits in (4, 3):
        one = results.GPTQ[f"gptq {bits} bit"]
        jobs |= {f"gptq {bits} bit, --experts {choice}": (one, choice) for choice in CHOICES}
    jobs |= {name: (results.OTHERS[name], "shrink") for name in ("awq 4 bit", "awq gptq 4 bit")}
    with tempfile.TemporaryDirectory() as folder:
        made = {
            name: results.quantize(model, Path(folder), name, one, RunOptions(experts=choice))
            for name, (one, choice) in jobs.items()
        }
        record = results.compare(model, made.values(), args)
    return results.table(record, ["original", *jobs]), results.divergences(record, made)


def few_tokens(model: str, args: argparse.Namespace) -> tuple[str, dict[tuple[int, str], float]]:
    """Table of the choices by ever fewer calibration tokens; KL divergence by sequences and choice."""
    found: dict[tuple[int, str], float] = {}
    lines = [
        "| sequences of 512 | tokens of an expert: least, median | rtn if starved | routed | all | shrink |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for samples in FEW:
        made = {}
        with tempfile.TemporaryDirectory() as folder:
            for choice in ("rtn", *CHOICES):
                patch = mock.patch.object(measure, "of_expert", starved_rounded)
                with patch if choice == "rtn" else nullcontext():
                    made[samples, choice] = results.quantize(
                        model,
                        Path(folder),
                        f"{choice} by {samples}",
                        ("gptq", {"bits": BITS}),
                        RunOptions(experts="routed" if choice == "rtn" else choice),
                        CalibrationOptions(samples=samples),
                    )
            found |= results.divergences(results.compare(model, made.values(), args), made)
            tokens = tokens_of(Path(made[samples, "routed"]))
        row = " | ".join(f"{found[samples, choice]:.4f}" for choice in ("rtn", *CHOICES))
        lines.append(f"| {samples} | {tokens[0]}, {tokens[len(tokens) // 2]} | {row} |")
    return "\n".join(lines) + "\n", found


def tokens_of(folder: Path) -> list[int]:
    """Calibration tokens of every expert, ascending."""
    manifest = json.loads((folder / "quantkit.json").read_text())
    return sorted(row["tokens"] for row in manifest["linears"] if row.get("tokens") is not None)


def gguf_types(model: str, args: argparse.Namespace) -> str:
    """Error feedback against llama-quantize's encoder in the same bytes."""
    lines = [
        "| type | KL: imatrix | KL: gptq | ratio | in llama.cpp: imatrix | gptq | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    limited = argparse.Namespace(**vars(args) | {"limit": args.limit or 10240})
    with tempfile.TemporaryDirectory() as folder:
        files = results_gguf.make(model, Path(folder), TYPES)
        computed = results_gguf.computed(model, files, limited)
        decoded = results_gguf.decoded(model, files, limited)
    kld = {path: row["metrics"]["kld"]["mean"] for path, row in decoded.items()}
    for name, rounded, fed_back in zip(TYPES, files[1::2], files[2::2], strict=True):
        pairs = [(of[rounded], of[fed_back]) for of in (kld, computed)]
        row = " | ".join(f"{theirs:.5f} | {ours:.5f} | {ours / theirs:.2f}" for theirs, ours in pairs)
        lines.append(f"| {name} | {row} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/demo-moe-8m"))
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--write", action="store_true", help="put the tables where they belong")
    args = parser.parse_args()

    def show(marker: str, text: str) -> None:
        if args.write:
            write_section(marker, text, ROOT / "docs/experts.md")
        else:
            print(text, flush=True)

    text, by_method = widths(args.model, args)
    show("mixture", text)
    text, by_tokens = few_tokens(args.model, args)
    show("starved", text)
    show("mixture-gguf", gguf_types(args.model, args))
    missed = [
        f"{n} bit" for n in (4, 3) if by_method[f"gptq {n} bit, --experts shrink"] > by_method[f"rtn {n} bit"]
    ]
    for samples in FEW:
        others = [by_tokens[samples, choice] for choice in ("rtn", "routed", "all")]
        if by_tokens[samples, "shrink"] >= max(others):
            missed.append(f"{samples} sequences")
    if missed:
        sys.exit(f"--experts shrink is above what it has to beat: {', '.join(missed)}")


if __name__ == "__main__":
    main()
