"""quantkit against llm-compressor, GPTQModel, AutoRound, bitsandbytes and llama-quantize on a real model.

    python scripts/bench_peers.py --text TEXT [--text TEXT] [--keep FOLDER] [--cases REGEX]
        [--libraries FOLDER] [--samples N] [--write]

All tools get the same original (scripts/real_models.py makes it), calibration tokens and group size, compute
in the dtype of the weights with one thread, and use their default options apart from those in a row's name.
quantkit reads each result and measures perplexity, KL divergence and top-1. For each model and number of
samples, a file in scripts/peers keeps all rows: only missing rows are measured, figures are added text by
text, and an interrupted run goes on with --keep. scripts/peer_pages.py prints pages from the rows.

Each tool runs in an environment of its own, made on the first run. Seconds of a row: from tokens to quantized
weights (`cpu`), and with loading and saving (`whole`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import peer_pages
from common import HELDOUT, ROOT, Failed, evaluated
from peers.jobs import python_of, run_job, setup_of, write_tokens

MODEL = ROOT / ".models" / peer_pages.MODEL
GROUP_SIZE = 64  # 128 does not divide the model's 576 columns
SAMPLES, SEQLEN = 64, 512  # calibration, unless --samples says otherwise
CONTEXT, LIMIT = 512, 10240  # tokens of a window and of a text that is measured
FILES = ("Q4_K_M", "Q2_K", "Q3_K_M", "IQ2_XXS", "Q8_0")
Width = int | str  # bits, llama.cpp's file type, or the name of a format


@dataclass(frozen=True)
class Case:
    """One tool with its options: fields of `Job` in peers/run.py."""

    label: str
    tool: str
    widths: tuple[Width, ...]
    options: dict = field(default_factory=dict)

    def job(self, width: Width) -> dict:
        """Return the options at a width. A format's are the same, whatever it is called."""
        options = {"group_size": GROUP_SIZE} | self.options
        if isinstance(width, int):
            return options | {"bits": width}
        if width not in FILES:
            return options
        if self.tool == "quantkit":
            return options | {"options": options["options"] | {"type": [width]}}
        return options | {"method": width}


def quantkit(label: str, widths: tuple[Width, ...], method: str, **options) -> Case:
    return Case(label, "quantkit", widths, {"method": method, "options": options})


GPTQ = {"method": "gptq"}
CASES = (  # in the order in which they are run
    quantkit("rtn", (4, 8, 3, 2), "gptq", solver="rtn"),
    Case("llm-compressor gptq", "llmcompressor", (4,), GPTQ),
    Case("GPTQModel, mse 2.4", "gptqmodel", (4,), GPTQ | {"mse": 2.4}),
    Case("bitsandbytes", "bitsandbytes", ("nf4",), {"method": "nf4-double"}),
    Case("bitsandbytes", "bitsandbytes", ("int8",), {"method": "int8"}),
    Case("AutoRound, 50 iterations", "autoround", (4,), {"method": "signround", "iterations": 50}),
    Case("llama-quantize, imatrix", "llamacpp", FILES),
    Case("AutoRound, 200 iterations", "autoround", (4, 3), {"method": "signround", "iterations": 200}),
    Case("llm-compressor FP8_DYNAMIC", "llmcompressor", ("fp8",), {"method": "FP8_DYNAMIC"}),
    Case("llm-compressor NVFP4A16", "llmcompressor", ("nvfp4",), {"method": "NVFP4A16"}),
    quantkit("gptq", (4, 3, 8, 2), "gptq"),
    quantkit("gguf", FILES, "gguf"),
    quantkit("int8", ("int8",), "int8"),
    quantkit("fp8", ("fp8",), "fp8"),
    quantkit("nf4", ("nf4",), "nf4"),
    quantkit("yaqa, asymmetric", (4,), "gptq", solver="yaqa", sym=False),
    quantkit("yaqa", (4, 3, 2), "gptq", solver="yaqa"),
    quantkit("awq", (4,), "awq"),
    quantkit("nf4, gptq", ("nf4",), "nf4", solver="gptq"),
    quantkit("fp4", ("nvfp4",), "fp4", format="nvfp4"),
    quantkit("w8a8", ("w8a8",), "w8a8"),
    quantkit("gguf, yaqa", ("Q4_K_M",), "gguf", solver="yaqa"),
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Store:
    """Rows of a model's file: what each tool made of a model at a width, and how all rows were measured."""

    def __init__(self, path: Path, protocol: dict):
        self.path = path
        stored = json.loads(path.read_text()) if path.exists() else {"protocol": protocol, "rows": []}
        if stored["protocol"] != protocol:
            raise SystemExit(f"{path} was measured otherwise: {stored['protocol']}, not {protocol}")
        self.protocol, self.rows = protocol, stored["rows"]

    def find(self, model: str, label: str, width: Width) -> dict | None:
        """Return the row of one case, None if there is none."""
        key = (model, label, width)
        return next((row for row in self.rows if (row["model"], row["label"], row["width"]) == key), None)

    def add(self, row: dict) -> None:
        """Write a row to disk, in the place of an older one; another process may have added others."""
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]
        old = self.find(row["model"], row["label"], row["width"])
        self.rows = [each for each in self.rows if each is not old] + [row]
        lines = ",\n  ".join(json.dumps(each) for each in self.rows)
        protocol = json.dumps(self.protocol)
        self.path.write_text(f'{{"protocol": {protocol}, "rows": [\n  {lines}\n]}}\n')


def protocol(model: Path, tokens: Path, texts: list[Path], samples: int) -> dict:
    """Return how rows are measured; rows of one store agree in all of it."""
    config = json.loads((model / "config.json").read_text())
    return {
        "calibration": "shipped text",
        "calibration_tokens_sha256": sha256(tokens),
        "dtype": config.get("dtype") or config["torch_dtype"],
        "context": CONTEXT,
        "limit": LIMIT,
        "texts": {text.name: sha256(text) for text in texts},
        "group_size": GROUP_SIZE,
        "model": {model.name: sha256(model / "model.safetensors")},
        "calibration_size": [samples, SEQLEN],
    }


def rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds >= 5 else 3)


def quantize(case: Case, width: Width, tokens: Path, folder: Path, args: argparse.Namespace):
    """Run one job; return its checkpoint and the beginning of its row. Raises Failed."""
    model, options = args.model, case.job(width)
    words = re.sub(r"\W+", "-", f"{model.name}-{case.label}-{width}")
    out = folder / (f"{words}.gguf" if width in FILES else words)
    python = python_of(case.tool)
    if not python.exists():
        subprocess.run([str(ROOT / "scripts/clients-setup.sh"), setup_of(case.tool)], check=True)
    if case.tool == "llamacpp" and not args.libraries:
        raise Failed("give --libraries")
    libraries = {"libraries": str(args.libraries)} if case.tool == "llamacpp" else {}
    print(words, file=sys.stderr, flush=True)
    result = run_job(case.tool, model, tokens, out, python, **options, **libraries)
    seconds = {name: phase["cpu"] for name, phase in result["phases"].items()}
    row = {"model": model.name, "label": case.label, "width": width, "tool": case.tool, "options": options}
    row |= {"cpu": rounded(seconds["quantize"]), "whole": rounded(sum(seconds.values()))}
    return out, row | {"peak_bytes": result["peak_bytes"], "versions": result["versions"]}


def store_of(args: argparse.Namespace) -> Path:
    """Return the file of rows of a model and a number of samples."""
    suffix = "" if args.samples == SAMPLES else f"-{args.samples}"
    return peer_pages.STORES / f"{args.model.name}{suffix}.json"


def measure(rows: list[dict], copies: list[Path], model: Path, text: Path) -> None:
    """Add the figures on a text to the row of the original and to those of its quantized copies."""
    record = evaluated(model, copies, text, CONTEXT, LIMIT)
    for row, result in zip(rows, record["models"], strict=True):
        metrics, size = result["metrics"], result["size"]
        for figure, part in (("ppl", "value"), ("kld", "mean")):
            if values := metrics[figure]:
                row.setdefault(figure, {})[text.name] = round(values[part], 6)
        if metrics["kld"]:
            row.setdefault("top1", {})[text.name] = round(metrics["top1"], 6)
        row |= {"weight_bytes": size["weight_bytes"], "bits": size["bits_per_quantized_weight"]}


def bench(args: argparse.Namespace, folder: Path) -> None:
    """Measure what the store lacks."""
    model, texts = args.model, [path.resolve() for path in args.text or [HELDOUT]]
    tokens = folder / f"tokens-{args.samples}-{SEQLEN}.json"
    write_tokens(model, tokens, args.samples, SEQLEN)
    store = Store(store_of(args), protocol(model, tokens, texts, args.samples))
    original = {"model": model.name, "label": "original", "width": 16, "tool": ""}
    original = store.find(model.name, "original", 16) or original
    copies: list[tuple[Path, dict]] = []
    for case in CASES:
        for width in case.widths:
            stored = store.find(model.name, case.label, width)
            complete = stored and all(text.name in stored.get("kld", {}) for text in texts)
            if complete or not re.search(args.cases, f"{case.label} {width}"):
                continue
            try:
                out, row = quantize(case, width, tokens, folder, args)
            except Failed as error:
                print(f"failed: {case.label} {width}: {error}", file=sys.stderr, flush=True)
                continue
            copies.append((out, stored or row))
    for text in texts:
        lacking = [(out, row) for out, row in copies if text.name not in row.get("kld", {})]
        if lacking:
            rows = [original, *(row for _, row in lacking)]
            measure(rows, [out for out, _ in lacking], model, text)
            for row in rows:
                store.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, action="append", help="measure on this text (default: the held-out text)")
    add("--model", type=Path, default=MODEL, help="the folder that real_models.py makes")
    add("--cases", default="", metavar="REGEX", help="run those of the missing rows that match; $^: none")
    add("--keep", type=Path, help="folder for checkpoints: jobs that left a result there are not run again")
    add("--libraries", type=Path, help="a prebuilt llama.cpp, as ggml.py takes it")
    add("--samples", type=int, default=SAMPLES, help="calibration sequences")
    add("--write", action="store_true", help="put the tables where they belong")
    args = parser.parse_args()
    args.model = args.model.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench(args, folder)
    peer_pages.real(store_of(args), args.write)


if __name__ == "__main__":
    main()
