"""Print pages from the rows that `bench_peers.py` keeps in `peers/`; nothing is measured.

    python scripts/peer_pages.py [--write]

--write: put the tables into the page of real models, those of SmolLM2 into the README as well, and write the
picture docs/loss.svg of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import ROOT, table, write_section

FORMATS = {  # as rows are ordered; the name of a format in tables
    16: "bfloat16",
    8: "8 bit",
    "int8": "int8",
    "fp8": "fp8",
    "w8a8": "w8a8",
    "Q8_0": "Q8_0",
    4: "4 bit",
    "nf4": "nf4",
    "nvfp4": "nvfp4",
    "Q4_K_M": "Q4_K_M",
    3: "3 bit",
    "Q3_K_M": "Q3_K_M",
    2: "2 bit",
    "Q2_K": "Q2_K",
    "IQ2_XXS": "IQ2_XXS",
}
README = (16, 8, "Q8_0", 4, "nf4", "Q4_K_M")  # formats of the README's table
SHORT = {"wikitext2_test.tokens.txt": "WikiText-2", "frankenstein.txt": "Frankenstein"}
PAGE = ROOT / "docs/measurements/real-models.md"
STORES = ROOT / "scripts/peers"
MODEL = "SmolLM2-135M-Instruct"  # of the README
Row = dict


def ours(row: Row) -> bool:
    """Return whether quantkit made the row with error feedback: plain rounding is a baseline."""
    return row["tool"] == "quantkit" and row["label"] != "rtn"


def name(row: Row) -> str:
    command = {"yaqa": "gptq --solver yaqa"}.get(row["label"], row["label"])
    return f"**quantkit {command}**" if ours(row) else command


def ordered(rows: list[Row], text: str) -> list[Row]:
    """Return measured rows by format, the least loss first."""
    formats = list(FORMATS)
    measured = [row for row in rows if text in row.get("ppl", {})]
    return sorted(measured, key=lambda row: (formats.index(row["width"]), loss(row, text)))


def loss(row: Row, text: str) -> float:
    return row.get("kld", {}).get(text, 0.0)


def best_peer(rows: list[Row], width: int | str, text: str) -> Row | None:
    """Return the row of another tool with the least loss in a format."""
    peers = [row for row in rows if row["width"] == width and row["tool"] not in ("quantkit", "")]
    return min(peers, key=lambda row: loss(row, text), default=None)


def cells(row: Row, texts: list[str]) -> dict[str, str]:
    """Return figures of a row by heading."""
    found = {"MB": f"{row['weight_bytes'] / 1e6:.1f}"}
    found["bits/weight"] = f"{row['bits']:.2f}" if row["bits"] else ""
    for text in texts:
        short = SHORT.get(text, text)
        figures = [(row.get(figure) or {}).get(text) for figure in ("ppl", "kld", "top1")]
        forms = (("perplexity", "{:.2f}"), ("KL", "{:.4f}"), ("top-1", "{:.1%}"))
        for (heading, form), value in zip(forms, figures, strict=True):
            found[f"{heading}, {short}"] = "" if value is None else form.format(value)
    made = "cpu" in row
    found["CPU s"] = f"{row['cpu']:.0f}" if made else ""
    found["with loading and saving"] = f"{row['whole']:.0f}" if made else ""
    found["peak MB"] = f"{row['peak_bytes'] / 1e6:.0f}" if made else ""
    return found


def whole_table(rows: list[Row], texts: list[str]) -> str:
    """Return Markdown of all rows; ratio: to the KL divergence of the best other tool in the format."""
    lines, heads = [], []
    for row in rows:
        peer = best_peer(rows, row["width"], texts[0])
        figures = cells(row, texts)
        figures["ratio"] = f"{loss(row, texts[0]) / loss(peer, texts[0]):.2f}" if peer else ""
        heads = list(figures)
        lines.append([FORMATS[row["width"]], name(row), *figures.values()])
    return table(["format", "tool and options", *heads], lines, left=2)


def short_table(rows: list[Row], text: str) -> str:
    """Return Markdown of the README's rows."""
    short = SHORT.get(text, text)
    figures = ["MB", f"perplexity, {short}", f"KL, {short}", f"top-1, {short}", "CPU s", "peak MB"]
    lines = []
    for row in rows:
        if row["width"] in README:
            found = cells(row, [text])
            lines.append([FORMATS[row["width"]], name(row), *(found[figure] for figure in figures)])
    return table(["format", "tool", *(head.partition(",")[0] for head in figures)], lines, left=2)


def short_protocol(how: dict, text: str) -> str:
    """Return Markdown: how the README's rows were measured."""
    size = " × ".join(map(str, how["calibration_size"]))
    return (
        f"\n{SHORT.get(text, text)}: {how['limit']:,} tokens, context {how['context']}. All tools: the same "
        f"{size} calibration tokens, groups of {how['group_size']}, CPU seconds of one thread.\n"
    )


def protocol(stored: dict) -> str:
    """Return Markdown: how all rows were measured, and by which versions."""
    rows, how = stored["rows"], stored["protocol"]
    found = {f"{row['tool']} {row['versions'][row['tool']]}" for row in rows if row["tool"]}
    texts = ", ".join(f"{SHORT.get(text, text)} (sha256 {sha[:12]})" for text, sha in how["texts"].items())
    (model, weights), *_ = how["model"].items()
    size = " × ".join(map(str, how["calibration_size"]))
    return (
        f"\n{model}, model.safetensors sha256 {weights[:12]}. Calibration of all tools: {size} tokens of the "
        f"{how['calibration']}. Groups of {how['group_size']}. Measured on {texts}: the first "
        f"{how['limit']:,} tokens, context {how['context']}, float32. CPU seconds of one thread "
        f"on a shared machine, from tokens to quantized weights. Versions: {', '.join(sorted(found))}.\n"
    )


def headline(rows: list[Row], text: str) -> str:
    """Return Markdown: the loss of quantkit and of the best other tool in the two usual formats."""
    lines = []
    for width, usual, best in ((4, "gptq", "yaqa, asymmetric"), ("Q4_K_M", "gguf", "gguf, yaqa")):
        peer = best_peer(rows, width, text)
        own = {row["label"]: row for row in rows if row["width"] == width and ours(row)}
        if not peer or usual not in own:
            continue
        line = f"- **{FORMATS[width]}**: KL divergence {loss(own[usual], text):.3f} with default options"
        line += f" ({own[usual]['cpu']:.0f} CPU seconds)"
        if best in own:
            line += f", {loss(own[best], text):.3f} with `--solver yaqa` ({own[best]['cpu']:.0f})"
        line += f". The best other tool, {peer['label']}: {loss(peer, text):.3f} ({peer['cpu']:.0f})."
        lines.append(line + "\n")
    return "".join(lines)


def real(path: Path, write: bool) -> None:
    """Print the sections of all pages from a store of rows, or put them where they belong."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    measured = {text for row in stored["rows"] for text in row.get("kld", {})}
    texts = {text: sha for text, sha in stored["protocol"]["texts"].items() if text in measured}
    stored["protocol"]["texts"], texts = texts, list(texts)
    rows = ordered(stored["rows"], texts[0])
    readme = ROOT / "README.md"
    sections = {(path.stem, PAGE): whole_table(rows, texts) + protocol(stored)}
    if shown := path.stem == MODEL:
        short = short_table(rows, texts[0]) + short_protocol(stored["protocol"], texts[0])
        sections |= {("headline", readme): headline(rows, texts[0]), ("results", readme): short}
    for (marker, document), text in sections.items():
        if write:
            write_section(marker, text, document)
        else:
            print(text)
    if write and shown:
        plot(path)


LINES = {  # label -> label in the picture, colour, marker
    "rtn": ("round to nearest", "#c4b7a6", "X"),
    "bitsandbytes": ("bitsandbytes", "#d1a0a0", "<"),
    "llm-compressor gptq": ("llm-compressor GPTQ", "#9aa0a6", "s"),
    "GPTQModel, mse 2.4": ("GPTQModel GPTQ", "#7a8793", "D"),
    "AutoRound, 50 iterations": ("AutoRound, 50 iterations", "#d9b36c", "^"),
    "AutoRound, 200 iterations": ("AutoRound, 200 iterations", "#b07d2b", "^"),
    "llama-quantize, imatrix": ("llama-quantize", "#a05195", "v"),
    "gptq": ("quantkit gptq", "#6fb1ff", "o"),
    "yaqa": ("quantkit gptq, yaqa", "#1a6fdb", "o"),
    "gguf": ("quantkit gguf", "#5ab4a0", "P"),
    "gguf, yaqa": ("quantkit gguf, yaqa", "#0b6b58", "P"),
}


def plot(path: Path) -> None:
    """Write docs/loss.svg, the picture of the README: loss against size, and loss against CPU seconds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "quantkit", "svg.fonttype": "none", "font.size": 9}
    stored = json.loads(path.read_text(encoding="utf-8"))
    text = next(iter(stored["protocol"]["texts"]))
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 4), layout="constrained", sharey=True)
    for label, (shown, colour, marker) in LINES.items():
        rows = [row for row in stored["rows"] if row["label"] == label and text in row.get("kld", {})]
        style = {"marker": marker, "color": colour, "ms": 5}
        style["lw"] = 0 if label == "bitsandbytes" else 1.8 if shown.startswith("quantkit") else 1
        for axis, figures in zip(axes, ("weight_bytes", "cpu"), strict=True):
            unit = 1e6 if figures == "weight_bytes" else 1
            points = sorted((row[figures] / unit, row["kld"][text]) for row in rows)
            if points:
                axis.plot(*zip(*points, strict=True), label=shown, **style)
            style["lw"] = 0  # seconds do not follow from bits
    axes[0].set(yscale="log", ylabel="KL divergence", xlabel="MB of the whole model")
    axes[1].set(xscale="log", xlabel="CPU seconds of the job, one thread")
    for axis in axes:
        axis.grid(alpha=0.3, which="both", lw=0.5)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs/loss.svg", metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put tables and picture where they belong")
    write = parser.parse_args().write
    for path in sorted(STORES.glob("*.json")):
        real(path, write)


if __name__ == "__main__":
    main()
