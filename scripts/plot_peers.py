"""Draw the picture of the README: loss against size, from the table in docs/measurements/other-tools.md.

    python scripts/plot_peers.py          # writes docs/loss.svg

The table is written by `bench_peers.py quality --write`; this script measures nothing.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
LINES = {  # label in the table -> label in the picture, colour, marker
    "llm-compressor gptq": ("llm-compressor GPTQ", "#9aa0a6", "s"),
    "GPTQModel, mse 2.4": ("GPTQModel GPTQ", "#7a8793", "D"),
    "AutoRound, 200 iterations": ("AutoRound", "#b07d2b", "^"),
    "llama-quantize, imatrix": ("llama-quantize", "#a05195", "v"),
    "**quantkit yaqa, target original, asymmetric**": ("quantkit gptq, yaqa", "#1a6fdb", "o"),
    "**quantkit gguf, yaqa, target original**": ("quantkit gguf, yaqa", "#0b3c8c", "P"),
}


def points() -> dict[str, list[tuple[float, float]]]:
    """Return the demo model's points of each line: bits per weight, KL divergence on frankenstein.txt."""
    text = (ROOT / "docs/measurements/other-tools.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- peers-all -->\n(.*?)<!-- /peers-all -->", text, re.DOTALL)[1]
    found = defaultdict(list)
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 3 and cells[0].startswith("demo,") and cells[1] in LINES:
            found[cells[1]].append((float(cells[2]), float(cells[3])))
    return found


def main() -> None:
    """Write docs/loss.svg."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    plt.rcParams |= {"svg.hashsalt": "quantkit", "svg.fonttype": "none", "font.size": 10}
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for name, found in points().items():
        label, colour, marker = LINES[name]
        ours = label.startswith("quantkit")
        x, y = zip(*sorted(found), strict=True)
        axes.plot(x, y, marker=marker, color=colour, label=label, lw=2 if ours else 1.2, ms=6 if ours else 5)
    axes.set(yscale="log", xlabel="bits per quantized weight", ylabel="KL divergence (lower is better)")
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(ROOT / "docs/loss.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
