"""`bench_peers.py formats`: what accelerators run today, by llm-compressor's own recipes and by quantkit.

FP8 by rows and by blocks, W8A8, and NVFP4 with and without quantized activations, on the demo model and its
twin with outlier channels. As in `peer_quality.py`, whose rows and rules these are: what llm-compressor
reached is kept in `peers/formats.json`, and only missing rows are run; quantkit's own are run every time.
Everything is measured as clients compute it, activations rounded.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from client_runs import ROOT, table, write_section
from peer_quality import CONTEXT, SAMPLES, SEQLEN, Case, Quality, versions

STORE = ROOT / "scripts/peers/formats.json"
LLMC = "llmcompressor"


@dataclass(frozen=True)
class FormatCase(Case):
    """A case of one format, by whose name it is known."""

    def job(self, width: str) -> dict:
        """The options, whatever the format is called."""
        return self.options


def _peer(width: str, label: str, method: str) -> FormatCase:
    return FormatCase(f"llm-compressor {label}", LLMC, {"method": method}, (width,))


def _ours(width: str, label: str, method: str, **options) -> FormatCase:
    return FormatCase(label, "quantkit", {"method": method, "options": options}, (width,))


PEERS = (
    _peer("FP8, rows", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    _peer("FP8, blocks", "FP8_BLOCK", "FP8_BLOCK"),
    _peer("W8A8", "SmoothQuant 0.8, GPTQ", "smoothquant-gptq"),
    _peer("NVFP4, weights", "NVFP4A16", "NVFP4A16"),
    _peer("NVFP4, both", "NVFP4", "NVFP4"),
)
OURS = (
    _ours("FP8, rows", "fp8", "fp8"),
    _ours("FP8, rows", "fp8, gptq", "fp8", solver="gptq"),
    _ours("FP8, blocks", "fp8, blocks", "fp8", block=128),
    _ours("FP8, blocks", "fp8, blocks, gptq", "fp8", block=128, solver="gptq"),
    _ours("W8A8", "w8a8", "w8a8"),
    _ours("NVFP4, weights", "fp4", "fp4", format="nvfp4"),
    _ours("NVFP4, both", "fp4, activations", "fp4", format="nvfp4", activations=True),
)


class Formats(Quality):
    """The same for formats."""

    STORE, CASES = STORE, PEERS

    def ours(self) -> list[dict]:
        """Rows of quantkit, made anew each time."""
        models = self.args.models or list(self.models)

        def wanted(model: str, case: Case, width: str) -> bool:
            return model in models and bool(re.search(self.args.rows, f"{case.label} {width}"))

        return list(self.run(list(OURS), wanted))


def rows(peers: list[dict], ours: list[dict], texts: list[str]) -> list[list[str]]:
    """Cells of the table, format by format; ratios are ours to llm-compressor's."""
    found = []
    for model in dict.fromkeys(row["model"] for row in [*peers, *ours]):
        for case in PEERS:
            width = case.widths[0]
            theirs = next((r for r in peers if (r["model"], r["width"]) == (model, width)), None)
            mine = [r for r in ours if (r["model"], r["width"]) == (model, width)]
            for row in [*([theirs] if theirs else []), *mine]:
                own = row is not theirs
                cells = [f"{model}, {width}", f"**quantkit {row['label']}**" if own else row["label"]]
                cells += [f"{row['bits']:.2f}", *(f"{row['kld'][text]:.5f}" for text in texts)]
                compared = own and theirs is not None
                cells += [f"{row['kld'][t] / theirs['kld'][t]:.2f}" if compared else "" for t in texts]
                cells += [f"{row['cpu']:.2f}", f"{row['cpu'] / theirs['cpu']:.2f}" if compared else ""]
                found.append(cells)
    return found


def run(bench, args: argparse.Namespace, demo: Path) -> None:
    """The whole part."""
    formats = Formats(bench, args, demo)
    peers = formats.peers()
    ours = [] if args.peers_only else formats.ours()
    texts = [path.name for path in formats.texts]
    short = [text.removesuffix(".txt") for text in texts]
    head = ["", "", "bits/weight", *(f"KL, {text}" for text in short), *(f"ratio, {text}" for text in short)]
    found = table([*head, "CPU s", "ratio"], rows(peers, ours, texts))
    note = (
        f"\nActivations rounded as clients round them; {formats.limit:,} tokens, context {CONTEXT}; "
        f"calibrated, where anything is, on the same {SAMPLES} × {SEQLEN} tokens; one thread, seconds from "
        f"tokens to solved weights. {versions([*peers, *ours])}.\n"
    )
    for key, error in formats.failed.items():
        print(f"failed: {key}: {error}", file=sys.stderr)
    if args.write:
        write_section("formats", found + note, ROOT / "docs/measurements.md")
    else:
        print(found, note, sep="\n")
