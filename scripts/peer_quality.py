"""`bench_peers.py quality` and `formats`: KL divergence of the best peers and of quantkit on the same tokens.

Two models: the demo model and its twin with outlier channels (outlier_twin.py). What peers reach is kept in
`peers/results.json` and `peers/formats.json` with what it was reached with, and only missing rows are run;
quantkit's own are run every time. quality: integers of 4, 3 and 2 bits and GGUF types; losses are of the
decoded weights in float32, read by quantkit. formats: what accelerators run today, FP8 by rows and by blocks,
W8A8, and NVFP4 with and without quantized activations, by llm-compressor's own recipes and by quantkit;
losses are as clients compute them, activations rounded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import outlier_twin
import yaml
from client_runs import ROOT, Failed, table, write_section

HELDOUT = ROOT / "tests/data/heldout.txt"
SAMPLES, SEQLEN = 128, 256  # of calibration
CONTEXT, LIMIT = 256, 40960  # of measuring
OWN = 512  # texts of the model's own
BITS = (4, 3, 2)  # in groups of 128
TYPES = ("Q4_K_M", "Q4_K_S", "Q3_K_M", "Q3_K_S", "Q2_K")
Width = int | str  # bits, or llama.cpp's file type


@dataclass(frozen=True)
class Case:
    """What one tool is run with. options: fields of `Job` in
    peers/run.py. own: sequences of the model's own text
    (`quantkit sample`) to calibrate on; 0: the text that all are given."""

    label: str
    tool: str
    options: dict
    widths: tuple[Width, ...] = BITS
    own: int = 0

    def job(self, width: Width) -> dict:
        """The options at a width. A format's are the same, whatever it is called."""
        if isinstance(width, int):
            return self.options | {"bits": width}
        if width not in TYPES:
            return self.options
        if self.tool == "quantkit":
            return self.options | {"options": self.options["options"] | {"type": [width]}}
        return self.options | {"method": width}


PEERS = (
    Case("GPTQModel, mse 2.4", "gptqmodel", {"method": "gptq", "mse": 2.4}),
    Case("GPTQModel, mse 2.4, GPTAQ", "gptqmodel", {"method": "gptq", "mse": 2.4, "gptaq": True}),
    Case("llm-compressor gptq", "llmcompressor", {"method": "gptq"}),
    Case("llm-compressor awq, asymmetric", "llmcompressor", {"method": "awq", "sym": False}),
    Case("llm-compressor awq, then gptq, asymmetric", "llmcompressor", {"method": "awq-gptq", "sym": False}),
    Case("AutoRound, 200 iterations", "autoround", {"method": "signround", "iterations": 200}),
    Case("llama-quantize, imatrix", "llamacpp", {}, TYPES),
    Case(f"AutoRound, {OWN} own texts", "autoround", {"method": "signround", "iterations": 200}, own=OWN),
)
OURS = {  # label -> METHOD[,OPTION=VALUE...], by the names of the method's Options; own: see `Case`
    "gptq": "gptq",
    "gptq, target original": "gptq,target=original",
    "yaqa, target original": "gptq,solver=yaqa,target=original",
    "yaqa, target original, asymmetric": "gptq,solver=yaqa,target=original,sym=false",
    "yaqa, target original, asymmetric, own text": f"gptq,solver=yaqa,target=original,sym=false,own={OWN}",
    "gguf": "gguf",
    "gguf, yaqa, target original": "gguf,solver=yaqa,target=original",
    "gguf, yaqa, target original, own text": f"gguf,solver=yaqa,target=original,own={OWN}",
}


def our_case(label: str, text: str) -> Case:
    """`gptq,solver=rtn` as a case."""
    method, *pairs = text.split(",")
    options = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    own, widths = options.pop("own", 0), TYPES if method == "gguf" else BITS
    return Case(label, "quantkit", {"method": method, "options": options}, widths, own)


def _peer(width: str, label: str, method: str) -> Case:
    return Case(f"llm-compressor {label}", "llmcompressor", {"method": method}, (width,))


def _ours(width: str, label: str, method: str, **options) -> Case:
    return Case(label, "quantkit", {"method": method, "options": options}, (width,))


FORMAT_PEERS = (
    _peer("FP8, rows", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    _peer("FP8, blocks", "FP8_BLOCK", "FP8_BLOCK"),
    _peer("W8A8", "SmoothQuant 0.8, GPTQ", "smoothquant-gptq"),
    _peer("NVFP4, weights", "NVFP4A16", "NVFP4A16"),
    _peer("NVFP4, both", "NVFP4", "NVFP4"),
)
FORMAT_OURS = (
    _ours("FP8, rows", "fp8", "fp8"),
    _ours("FP8, rows", "fp8, gptq", "fp8", solver="gptq"),
    _ours("FP8, blocks", "fp8, blocks", "fp8", block=128),
    _ours("FP8, blocks", "fp8, blocks, gptq", "fp8", block=128, solver="gptq"),
    _ours("W8A8", "w8a8", "w8a8"),
    _ours("NVFP4, weights", "fp4", "fp4", format="nvfp4"),
    _ours("NVFP4, both", "fp4, activations", "fp4", format="nvfp4", activations=True),
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add_flags(group) -> None:
    """Flags of this part, for an argparse group."""
    add = group.add_argument
    add("--text", type=Path, default=HELDOUT, help="measured on, beside the held-out text")
    add("--ours", action="append", default=[], metavar="NAME=METHOD,OPTION=VALUE", help="besides `OURS`")
    add("--only-given", action="store_true", help="of quantkit, what --ours names")
    add("--peers", default="", metavar="REGEX", help="run those of the missing rows that match")
    add("--peers-only", action="store_true", help="run nothing of quantkit")
    add("--models", action="append", choices=["demo", "twin"], help="for quantkit's rows (default: both)")
    add("--rows", default="", metavar="REGEX", help="of quantkit's formats, those that match")
    add("--store", type=Path, help="where the peers' rows are kept (default: the part's own)")
    add("--keep", type=Path, help="folder for checkpoints: jobs that left a result there are not run again")
    add("--libraries", type=Path, help="a prebuilt llama.cpp, as gguf_mixtures.py takes it")
    add("--write", action="store_true", help="put the tables where they belong")


class Store:
    """Rows of `results.json`: what each tool made of a model at a width, and what it was made with."""

    def __init__(self, path: Path, protocol: dict):
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {"protocol": protocol, "rows": []}
        if found["protocol"] != protocol:
            raise SystemExit(f"{path} was measured otherwise: {found['protocol']}, not {protocol}")
        self.protocol, self.rows = protocol, found["rows"]

    def find(self, model: str, label: str, width: Width) -> dict | None:
        """The row of one case, if it is there."""
        key = (model, label, width)
        return next((row for row in self.rows if (row["model"], row["label"], row["width"]) == key), None)

    def add(self, row: dict) -> None:
        """Keep a row on disk, in the place of an older one; another process may have added others."""
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]
        old = self.find(row["model"], row["label"], row["width"])
        self.rows = [each for each in self.rows if each is not old] + [row]
        lines = ",\n  ".join(json.dumps(each) for each in self.rows)
        protocol = json.dumps(self.protocol)
        self.path.write_text(f'{{"protocol": {protocol}, "rows": [\n  {lines}\n]}}\n')


def measure(base: Path, made: dict[tuple, Path], text: Path, limit: int) -> dict[tuple, dict]:
    """KL divergence, bytes and bits per quantized weight of every checkpoint by its key."""
    import torch

    from quantkit.evaluation import evaluate
    from quantkit.evaluation import windows as windows_of
    from quantkit.models.files.open import open_checkpoint

    torch.set_num_threads(1)
    checkpoints = [open_checkpoint(str(path)) for path in (base, *made.values())]
    windows = windows_of.load(checkpoints[0], text, CONTEXT, None, limit)
    chosen = frozenset({"kld"})
    found = evaluate.evaluate(checkpoints, windows, torch.float32, torch.device("cpu"), chosen=chosen)
    return {
        key: {
            "kld": result.metrics.kld.mean,
            "weight_bytes": result.size.weight_bytes,
            "bits": result.size.bits_per_quantized_weight,
        }
        for key, result in zip(made, found.results[1:], strict=True)
    }


class Quality:
    """All cases on all models. bench: the `Bench` of bench_peers.py, which runs the jobs. STORE: where rows
    of the peers, CASES, are kept, unless --store says so."""

    NAME, CASES = "quality", PEERS
    STORE = ROOT / "scripts/peers/results.json"

    def __init__(self, bench, args: argparse.Namespace, demo: Path):
        self.bench, self.args = bench, args
        self.limit = 2048 if args.quick else LIMIT
        self.folder = args.keep or bench.folder
        self.models = {"demo": demo, "twin": outlier_twin.make(demo, self.folder / "twin")}
        self.size = (8, 128) if args.quick else (SAMPLES, SEQLEN)
        self.tokens = bench.tokens(demo, *self.size)
        self.texts = list(dict.fromkeys([args.text.resolve(), HELDOUT]))
        protocol = {
            "calibration": f"{args.calibration or 'shipped text'}",
            "calibration_tokens_sha256": sha256(self.tokens),
            "dtype": args.dtype,
            "context": CONTEXT,
            "limit": self.limit,
            "texts": {path.name: sha256(path) for path in self.texts},
        }
        place = self.folder / f"quick-{self.STORE.name}" if args.quick else args.store or self.STORE
        self.store = Store(place, protocol)
        self.failed: dict[str, str] = {}

    def run(self, cases: list[Case], wanted: Callable[[str, Case, Width], bool]) -> Iterator[dict]:
        """Rows of the cases that are wanted, on every model: all are made, then all are measured at once."""
        for model, base in self.models.items():
            made = {}
            for case in cases:
                for width in case.widths:
                    if wanted(model, case, width):
                        made |= self.make(model, case, width)
            paths = {key: path for key, (path, _) in made.items()}
            for text in self.texts if made else ():
                for key, found in measure(base, paths, text, self.limit).items():
                    row = made[key][1]
                    row.setdefault("kld", {})[text.name] = round(found.pop("kld"), 6)
                    row |= found
            yield from (row for _, row in made.values())

    def make(self, model: str, case: Case, width: Width) -> dict[tuple, tuple[Path, dict]]:
        """Run one job: checkpoint and beginning of its row by label and width, nothing if it fails."""
        words = re.sub(r"\W+", "-", f"{model}-{case.label}-{width}")
        out = self.folder / (f"{words}.gguf" if width in TYPES else words)
        options, tokens, written = case.job(width), self.tokens, 0.0
        if case.own:
            text, written = self.own_text(model)
            samples = min(case.own, self.size[0]) if self.args.quick else case.own
            tokens = self.bench.tokens(self.models[model], samples, self.size[1], text)
            options |= {"calibration": str(text)}
        place = {"libraries": str(self.args.libraries)} if case.tool == "llamacpp" else {}
        try:
            measured = self.bench.job(case.tool, self.models[model], tokens, out, **options, **place)
        except Failed as error:
            print(f"{words}: {error}", file=sys.stderr, flush=True)
            self.failed[words] = str(error)
            return {}
        options.pop("calibration", None)
        row = {"model": model, "label": case.label, "width": width, "tool": case.tool, "options": options}
        row |= {"cpu": _rounded(measured.cpu + written), "whole": _rounded(measured.whole + written)}
        row |= {"peak_bytes": measured.peak_bytes, "versions": measured.versions}
        return {(case.label, width): (out, row)}

    def own_text(self, model: str) -> tuple[Path, float]:
        """Text that a model has written by itself, and the CPU seconds that took."""
        path = self.folder / f"{model}-own.jsonl"
        took = path.with_suffix(".seconds")
        if not took.exists():
            samples = self.size[0] if self.args.quick else OWN
            asked = ["sample", self.models[model], "-o", path, "--samples", samples, "--seqlen", self.size[1]]
            asked += ["--batch-size", 128, "--dtype", "float32", "-q", "--overwrite"]
            command = [sys.executable, "-m", "quantkit", *map(str, asked)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            took.write_text(f"{cpu:.1f}")
        return path, float(took.read_text())

    def peers(self) -> list[dict]:
        """Rows of all peers; what the store lacks is run, one after the other."""

        def wanted(model: str, case: Case, width: Width) -> bool:
            named = re.search(self.args.peers, f"{model} {case.label} {width}")
            return bool(named) and not self.store.find(model, case.label, width)

        for row in self.run(list(self.CASES), wanted):
            self.store.add(row)
        return self.store.rows

    def ours(self) -> list[dict]:
        """Rows of quantkit, made anew each time."""
        models = self.args.models or list(self.models)
        return list(self.run(self.own_cases(), lambda model, *_: model in models))

    def own_cases(self) -> list[Case]:
        given = dict(each.split("=", 1) for each in self.args.ours)
        chosen = given if self.args.only_given else OURS | given
        return [our_case(label, text) for label, text in chosen.items()]

    def show(self) -> None:
        """Run everything, print the tables or put them where they belong."""
        peers = self.peers()
        ours = [] if self.args.peers_only else self.ours()
        for key, error in self.failed.items():
            print(f"failed: {key}: {error}", file=sys.stderr)
        tools = {f"{row['tool']} {row['versions'].get(row['tool'], '')}".strip() for row in [*peers, *ours]}
        note = f"one thread, seconds from tokens to solved weights. {', '.join(sorted(tools))}.\n"
        texts = [path.name for path in self.texts]
        for marker, text in self.sections(peers, ours, texts, note).items():
            if self.args.write:
                write_section(marker, text, ROOT / "docs/measurements/other-tools.md")
                if f"<!-- {marker} -->" in (ROOT / "README.md").read_text():
                    write_section(marker, text, ROOT / "README.md")
            else:
                print(text)

    def sections(self, peers: list[dict], ours: list[dict], texts: list[str], note: str) -> dict[str, str]:
        """Marker -> Markdown: the best of both at every width, and all rows."""
        best, every = tables(peers, ours, texts)
        about = (
            f"\nKL divergence on {texts[0]} unless another is named, {self.limit:,} tokens, "
            f"context {CONTEXT}; calibrated on the same {SAMPLES} × {SEQLEN} tokens, or, in rows with own "
            f"text, on {OWN} × {SEQLEN} that the model wrote (`quantkit sample`, its seconds included); "
            f"groups of 128; "
        )
        return {"peers": best + about + note, "peers-all": every}


class Formats(Quality):
    """The same for formats."""

    NAME, CASES = "formats", FORMAT_PEERS
    STORE = ROOT / "scripts/peers/formats.json"

    def own_cases(self) -> list[Case]:
        return [case for case in FORMAT_OURS if re.search(self.args.rows, f"{case.label} {case.widths[0]}")]

    def sections(self, peers: list[dict], ours: list[dict], texts: list[str], note: str) -> dict[str, str]:
        """Format by format; ratios are ours to llm-compressor's."""
        rows = []
        for model in dict.fromkeys(row["model"] for row in [*peers, *ours]):
            for width in (case.widths[0] for case in self.CASES):
                theirs, mine = (
                    [r for r in of if (r["model"], r["width"]) == (model, width)] for of in (peers, ours)
                )
                for row in [*theirs[:1], *mine]:
                    own = row["tool"] == "quantkit"
                    other = theirs[0] if own and theirs else None
                    cells = [f"{model}, {width}", f"**quantkit {row['label']}**" if own else row["label"]]
                    cells += [f"{row['bits']:.2f}", *(f"{row['kld'][text]:.5f}" for text in texts)]
                    cells += [
                        f"{row['kld'][text] / other['kld'][text]:.2f}" if other else "" for text in texts
                    ]
                    cells += [f"{row['cpu']:.2f}", f"{row['cpu'] / other['cpu']:.2f}" if other else ""]
                    rows.append(cells)
        head = ["", "", "bits/weight", *columns(texts, "KL"), *columns(texts, "ratio"), "CPU s", "ratio"]
        about = (
            f"\nActivations rounded as clients round them; {self.limit:,} tokens, context {CONTEXT}; "
            f"methods with calibration use the same {SAMPLES} × {SEQLEN} tokens; "
        )
        return {"formats": table(head, rows) + about + note}


def columns(texts: list[str], what: str) -> list[str]:
    """Headings of a figure on every text."""
    return [f"{what}, {text.removesuffix('.txt')}" for text in texts]


def _rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds >= 5 else 3)


def tables(peers: list[dict], ours: list[dict], texts: list[str]) -> tuple[str, str]:
    """Markdown: the best of both at every width, and all rows."""
    best, every = [], []
    for model in dict.fromkeys(row["model"] for row in [*peers, *ours]):
        for width in (*BITS, *TYPES):
            theirs, own = (
                sorted(
                    (row for row in rows if (row["model"], row["width"]) == (model, width)),
                    key=lambda row: row["kld"][texts[0]],
                )
                for rows in (peers, ours)
            )
            name = f"{model}, {width} bit" if isinstance(width, int) else f"{model}, {width}"
            for row in [*theirs, *own]:
                label = f"**quantkit {row['label']}**" if row["tool"] == "quantkit" else row["label"]
                ratios = [
                    f"{row['kld'][t] / min(r['kld'][t] for r in theirs):.2f}" if theirs else "" for t in texts
                ]
                losses = [f"{row['kld'][text]:.5f}" for text in texts]
                every.append([name, label, f"{row['bits']:.2f}", *losses, *ratios, f"{row['cpu']:.0f}"])
            if theirs and own:
                first, mine = theirs[0], own[0]
                cells = [first["label"], f"{first['kld'][texts[0]]:.5f}", f"{first['cpu']:.0f}"]
                cells += [mine["label"], f"{mine['kld'][texts[0]]:.5f}", f"{mine['cpu']:.0f}"]
                ratios = [
                    f"{mine['kld'][text] / min(row['kld'][text] for row in theirs):.2f}" for text in texts
                ]
                best.append([name, *cells, *ratios])
    kl, ratio = columns(texts, "KL"), columns(texts, "ratio")
    best_head = ["", "best peer", "KL", "CPU s", "quantkit", "KL", "CPU s", *ratio]
    return table(best_head, best), table(["", "", "bits/weight", *kl, *ratio, "CPU s"], every)
