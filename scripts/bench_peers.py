"""quantkit against llm-compressor, GPTQModel, AutoRound, AutoAWQ and llama-quantize, on the same tokens.

    python scripts/bench_peers.py [gptq] [awq] [--quick] [--repeats N]
    python scripts/bench_peers.py quality --text frankenstein.txt --dtype float32 [--write]
        [--ours "NAME=METHOD,OPTION=VALUE"]
    python scripts/bench_peers.py formats --text frankenstein.txt --dtype float32 [--write]
    python scripts/bench_peers.py real --text TEXT [--keep FOLDER] [--peers REGEX] [--write]

gptq: two random Llama blocks of 768/2048, 32 sequences of 512 tokens, 4 bit in groups of 128, default
options: CPU seconds at one thread, wall seconds at two, peak memory. awq: one block, 4 and 16 sequences.
quality: KL divergence at 4, 3 and 2 bit and of GGUF types, of the decoded weights in float32, read by
quantkit. formats: of FP8, W8A8 and NVFP4, as clients compute them, activations rounded. Both on the demo
model and on its twin with outlier channels; what the others reached is kept in peers/*.json, and only
missing rows are run. real: the same and more on a pretrained model that real_models.py makes; rows of
quantkit are kept as well, and `peer_pages.py` prints pages from them. The quantization phase is from tokens
to solved weights; imports, loading, saving and verification stand apart. Each tool runs in an environment
of its own, made on the first run unless a python is given. Machines are noisy: everything runs in turn, and
the least of the repeats counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import peer_pages
import yaml
from common import DEMO, ROOT, Failed, evaluated, outlier_twin, random_model, run_script, table, write_section

SHAPE = {"hidden": 768, "inner": 2048, "heads": 12, "vocabulary": 32000}
QUICK_SHAPE = {"hidden": 256, "inner": 512, "heads": 4, "vocabulary": 4096}
ENVIRONMENTS = {  # name in clients-setup.sh, where it puts the python
    "llmcompressor": ("llmcompressor", ".venv-peers/llmcompressor/bin/python"),
    "gptqmodel": ("clients", ".venv-clients/bin/python"),
    "autoawq": ("legacy", ".venv-legacy/bin/python"),
    "autoround": ("autoround", ".venv-peers/autoround/bin/python"),
    "bitsandbytes": ("clients", ".venv-clients/bin/python"),
}
OWN = ("quantkit", "llamacpp")  # run in this environment


@dataclass(frozen=True)
class Measured:
    """One run of one tool. Seconds of the quantization phase; `whole`: with loading and saving."""

    cpu: float
    wall: float
    whole: float
    peak_bytes: int
    versions: dict[str, str]

    def least(self, other: Measured) -> Measured:
        """Return the least of each figure."""
        figures = {key: min(getattr(self, key), getattr(other, key)) for key in FIGURES}
        return Measured(**figures, versions=self.versions)


FIGURES = ("cpu", "wall", "whole", "peak_bytes")


class Bench:
    """Runs jobs of every tool on one calibration block. given: tool -> interpreter, where one was named."""

    def __init__(self, given: dict[str, str | None], folder: Path, args: argparse.Namespace):
        self.given, self.folder, self.args = given, folder, args
        self.versions: dict[str, str] = {}
        self._runs = 0

    def python(self, tool: str) -> str:
        """Return the tool's interpreter; a missing environment is made."""
        if tool in OWN:
            return sys.executable
        name, place = ENVIRONMENTS[tool]
        python = self.given.get(tool) or str(ROOT / place)
        if not Path(python).exists():
            subprocess.run([str(ROOT / "scripts/clients-setup.sh"), name], check=True)
        return python

    def tokens(self, model: Path, samples: int, seqlen: int, text: Path | None = None) -> Path:
        """Write the tokens of every tool, cut as quantkit cuts them, and return the file.

        text: instead of the calibration text.
        """
        from quantkit.models.files.open import open_checkpoint
        from quantkit.options import CalibrationOptions
        from quantkit.text import calibration

        named = str(text) if text else self.args.calibration
        options = CalibrationOptions(named, samples=samples, seqlen=seqlen)
        rows = calibration.load(open_checkpoint(str(model)), options).tokens.tolist()
        name = f"{text.stem}-" if text else ""
        path = self.folder / f"tokens-{name}{samples}-{seqlen}.json"
        path.write_text(json.dumps(rows))
        return path

    def run(self, tool: str, model: Path, tokens: Path, **options) -> tuple[Measured, Path]:
        """One job in a process of its own; the checkpoint and what it took. Raises Failed."""
        self._runs += 1
        out = self.folder / f"{self._runs}-{tool}"
        return self.job(tool, model, tokens, out, **options), out

    def job(self, tool: str, model: Path, tokens: Path, out: Path, **options) -> Measured:
        """One job in a process of its own, unless it left a result before. Raises Failed."""
        request = {"tool": tool, "model": str(model), "tokens": str(tokens), "out": str(out)}
        request |= {"calibration": self.args.calibration} | options
        path = out.with_name(f"{out.name}.json")
        finished = path.with_suffix(".result.json")
        if not finished.exists():
            script = ROOT / "scripts/peers/run.py"
            pythonpath = str(ROOT) if tool in OWN else ""
            run_script(self.python(tool), script, request, path, options.get("threads", 1), pythonpath)
        result = json.loads(finished.read_text())
        phases = result["phases"]
        whole = sum(phase["cpu"] for phase in phases.values())
        self.versions[tool] = result["versions"][tool]
        quantize = phases["quantize"]
        measured = Measured(
            quantize["cpu"], quantize["wall"], whole, result["peak_bytes"], result["versions"]
        )
        print(f"{tool} {options}: {measured}", file=sys.stderr, flush=True)
        return measured

    def least(self, tools: list[str], *job, **options) -> dict[str, Measured | str]:
        """The least of each figure over the repeats, the tools in turn; a tool's error stands for it."""
        found: dict[str, Measured | str] = {}
        for _ in range(self.args.repeats):
            for tool in tools:
                try:
                    new, _ = self.run(tool, *job, **options)
                except Failed as error:
                    found[tool] = str(error)
                    print(f"{tool}: {error}", file=sys.stderr)
                    continue
                old = found.get(tool, new)
                if isinstance(old, Measured):
                    found[tool] = old.least(new)
        return found


def make_model(bench: Bench, layers: int) -> Path:
    """Return a random Llama of the benchmark's shape."""
    folder = bench.folder / f"model-{layers}"
    shape = QUICK_SHAPE if bench.args.quick else SHAPE
    random_model(folder, layers=layers, context=2048, dtype=bench.args.dtype, spread=True, **shape)
    return folder


def demo_model(bench: Bench) -> Path:
    """The demo model, stored in the dtype the tools are to compute in: they take that of the weights."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(DEMO, bench.folder / "demo"))
    dtype = getattr(torch, bench.args.dtype)
    weights = load_file(folder / "model.safetensors")
    converted = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": bench.args.dtype}))
    return folder


def columns(found: dict[str, Measured | str], figures: dict[str, tuple[str, float, str]]) -> list[list[str]]:
    """Rows of a table, one per tool, and the ratio of ours to the best peer's. figures: see `bench_gptq`."""
    rows = []
    for tool, measured in found.items():
        if isinstance(measured, str):
            rows.append([tool, f"failed: {measured}", *[""] * (len(figures) - 1)])
        else:
            rows.append(
                [tool, *(format(getattr(measured, key) / unit, form) for key, unit, form in figures.values())]
            )
    ratios = []
    for key, _, _ in figures.values():
        values = {tool: getattr(each, key) for tool, each in found.items() if isinstance(each, Measured)}
        ours = values.pop("quantkit", None)
        ratios.append(f"{ours / min(values.values()):.2f}" if ours and values else "–")
    return [*rows, ["**quantkit / best peer**", *ratios]]


CPU_FIGURES = {  # column -> field, unit, format
    "CPU s, 1 thread": ("cpu", 1, ".1f"),
    "with loading and saving": ("whole", 1, ".1f"),
    "peak MiB": ("peak_bytes", 2**20, ".0f"),
}


def bench_gptq(bench: Bench) -> None:
    """The GPTQ job: CPU seconds and memory at one thread, then wall seconds at two."""
    quick = bench.args.quick
    tools = ["llmcompressor", "gptqmodel", "quantkit"]
    model = make_model(bench, layers=1 if quick else 2)
    job = model, bench.tokens(model, *(4, 64) if quick else (32, 512))
    found = bench.least(tools, *job, method="gptq", threads=1)
    print("## GPTQ, 4 bit, groups of 128\n")
    print(table(["", *CPU_FIGURES], columns(found, CPU_FIGURES)))
    found = bench.least(tools, *job, method="gptq", threads=2)
    wall = {"wall s, 2 threads": ("wall", 1, ".1f")}
    print(table(["", *wall], columns(found, wall)))


def bench_awq(bench: Bench) -> None:
    """AWQ on one block: the cost of its searches, and how it grows with the tokens."""
    quick = bench.args.quick
    model = make_model(bench, layers=1)
    for samples in (2, 4) if quick else (4, 16):
        tokens = bench.tokens(model, samples, 64 if quick else 512)
        tools = ["llmcompressor", "gptqmodel", "autoawq", "quantkit"]
        found = bench.least(tools, model, tokens, method="awq", sym=False, threads=1)
        print(f"## AWQ, one block, {samples} sequences\n")
        print(table(["", *CPU_FIGURES], columns(found, CPU_FIGURES)))


def warm_up(bench: Bench, parts: list[str]) -> None:
    """GPTQModel compiles a packer once, the others fill caches of their own."""
    warm = make_model(bench, 1)
    for tool in ["quantkit", "llmcompressor", "gptqmodel", *(["autoawq"] if "awq" in parts else [])]:
        try:
            method = "awq" if tool == "autoawq" else "gptq"
            bench.run(tool, warm, bench.tokens(warm, 2, 32), method=method, sym=method == "gptq")
        except Failed as error:
            print(f"{tool}: {error}", file=sys.stderr)


# quality and formats

HELDOUT = ROOT / "heldout/heldout.txt"
SMOL = ROOT / ".models/SmolLM2-135M-Instruct"
SAMPLES, SEQLEN = 128, 256  # of calibration
CONTEXT, LIMIT = 256, 40960  # of measuring
OWN_TEXTS = 512  # texts of the model's own
BITS = (4, 3, 2)  # in groups of 128
LABELS = ("model, format", "tool and options")  # headings of the first columns
TYPES = ("Q4_K_M", "Q4_K_S", "Q3_K_M", "Q3_K_S", "Q2_K", "IQ2_XXS")
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
        from quantkit.models.gguf.file_types import FILE_TYPES

        if isinstance(width, int):
            return self.options | {"bits": width}
        if width not in FILE_TYPES:
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
    Case(
        f"AutoRound, {OWN_TEXTS} own texts",
        "autoround",
        {"method": "signround", "iterations": 200},
        own=OWN_TEXTS,
    ),
)
OURS = {  # label -> METHOD[,OPTION=VALUE...], by the names of the method's Options; own: see `Case`
    "gptq": "gptq",
    "gptq, target own": "gptq,target=own",
    "yaqa": "gptq,solver=yaqa",
    "yaqa, asymmetric": "gptq,solver=yaqa,sym=false",
    "yaqa, asymmetric, own text": f"gptq,solver=yaqa,sym=false,own={OWN_TEXTS}",
    "gguf": "gguf",
    "gguf, yaqa": "gguf,solver=yaqa",
    "gguf, yaqa, own text": f"gguf,solver=yaqa,own={OWN_TEXTS}",
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
    _peer("NVFP4, weights only", "NVFP4A16", "NVFP4A16"),
    _peer("NVFP4, weights and activations", "NVFP4", "NVFP4"),
)
FORMAT_OURS = (
    _ours("FP8, rows", "fp8", "fp8"),
    _ours("FP8, rows", "fp8, gptq", "fp8", solver="gptq"),
    _ours("FP8, blocks", "fp8, blocks", "fp8", block=128),
    _ours("FP8, blocks", "fp8, blocks, gptq", "fp8", block=128, solver="gptq"),
    _ours("W8A8", "w8a8", "w8a8"),
    _ours("NVFP4, weights only", "fp4", "fp4", format="nvfp4"),
    _ours("NVFP4, weights and activations", "fp4, activations", "fp4", format="nvfp4", activations=True),
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add_flags(group) -> None:
    """Flags of this part, for an argparse group."""
    add = group.add_argument
    add("--text", type=Path, action="append", help="measured on; quality: beside the held-out text")
    add("--model", type=Path, default=SMOL, help="real: the folder that real_models.py makes")
    add("--only", default="", metavar="REGEX", help="of our rows, run those that match; nothing is written")
    add("--ours", action="append", default=[], metavar="NAME=METHOD,OPTION=VALUE", help="besides `OURS`")
    add("--peers", default="", metavar="REGEX", help="run those of the missing rows that match; $^: none")
    add("--keep", type=Path, help="folder for checkpoints: jobs that left a result there are not run again")
    add("--libraries", type=Path, help="a prebuilt llama.cpp, as ggml.py takes it")
    add("--write", action="store_true", help="put the tables where they belong")


NAMED = {"method": "gptq"}


def _real_ours(label: str, widths: tuple[Width, ...], method: str, **options) -> Case:
    return Case(label, "quantkit", {"method": method, "options": options}, widths)


FILES = ("Q4_K_M", "Q2_K", "Q3_K_M", "IQ2_XXS", "Q8_0")
REAL_CASES = (  # in the order in which they are run
    _real_ours("rtn", (4, 8, 3, 2), "gptq", solver="rtn"),
    Case("llm-compressor gptq", "llmcompressor", NAMED, (4,)),
    Case("GPTQModel, mse 2.4", "gptqmodel", NAMED | {"mse": 2.4}, (4,)),
    Case("bitsandbytes", "bitsandbytes", {"method": "nf4-double"}, ("nf4",)),
    Case("bitsandbytes", "bitsandbytes", {"method": "int8"}, ("int8",)),
    Case("AutoRound, 50 iterations", "autoround", {"method": "signround", "iterations": 50}, (4,)),
    Case("llama-quantize, imatrix", "llamacpp", {}, FILES),
    Case("AutoRound, 200 iterations", "autoround", {"method": "signround", "iterations": 200}, (4,)),
    Case("llm-compressor FP8_DYNAMIC", "llmcompressor", {"method": "FP8_DYNAMIC"}, ("fp8",)),
    Case("llm-compressor NVFP4A16", "llmcompressor", {"method": "NVFP4A16"}, ("nvfp4",)),
    _real_ours("gptq", (4, 3, 8, 2), "gptq"),
    _real_ours("gguf", FILES, "gguf"),
    _real_ours("int8", ("int8",), "int8"),
    _real_ours("fp8", ("fp8",), "fp8"),
    _real_ours("nf4", ("nf4",), "nf4"),
    _real_ours("yaqa, asymmetric", (4,), "gptq", solver="yaqa", sym=False),
    _real_ours("yaqa", (4, 3, 2), "gptq", solver="yaqa"),
    _real_ours("awq", (4,), "awq"),
    _real_ours("nf4, gptq", ("nf4",), "nf4", solver="gptq"),
    _real_ours("fp4", ("nvfp4",), "fp4", format="nvfp4"),
    _real_ours("w8a8", ("w8a8",), "w8a8"),
    _real_ours("gguf, yaqa", ("Q4_K_M",), "gguf", solver="yaqa"),
)


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


class Quality:
    """All cases on all models. bench: runs the jobs. STORE: where rows of the peers, CASES, are kept."""

    NAME, CASES = "quality", PEERS
    STORE = ROOT / "scripts/peers/results.json"
    SIZE, CONTEXT, LIMIT = (SAMPLES, SEQLEN), CONTEXT, LIMIT
    EVERY_JOB: dict = {}  # options of all tools

    def __init__(self, bench, args: argparse.Namespace):
        self.bench, self.args = bench, args
        self.limit = 2048 if args.quick else self.LIMIT
        self.folder = (args.keep or bench.folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.models = self.originals()
        self.size = (8, 128) if args.quick else self.SIZE
        self.tokens = bench.tokens(next(iter(self.models.values())), *self.size)
        self.texts = self.measured_on()
        place = self.folder / f"quick-{self.STORE.name}" if args.quick else self.STORE
        self.store = Store(place, self.protocol())
        self.failed: dict[str, str] = {}

    def protocol(self) -> dict:
        """What all rows of the store have in common."""
        return {
            "calibration": f"{self.args.calibration or 'shipped text'}",
            "calibration_tokens_sha256": sha256(self.tokens),
            "dtype": self.args.dtype,
            "context": self.CONTEXT,
            "limit": self.limit,
            "texts": {path.name: sha256(path) for path in self.texts},
        } | self.EVERY_JOB

    def originals(self) -> dict[str, Path]:
        """Models by the name of their rows."""
        demo = demo_model(self.bench)
        return {"demo": demo, "twin": outlier_twin(demo, self.folder / "twin")}

    def measured_on(self) -> list[Path]:
        """Texts to measure on."""
        return list(dict.fromkeys([*(path.resolve() for path in self.args.text or []), HELDOUT]))

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
                record = evaluated(base, paths.values(), text, self.CONTEXT, self.limit)
                for key, found in zip(paths, record["models"][1:], strict=True):
                    row, size = made[key][1], found["size"]
                    row.setdefault("kld", {})[text.name] = round(found["metrics"]["kld"]["mean"], 6)
                    row |= {"weight_bytes": size["weight_bytes"], "bits": size["bits_per_quantized_weight"]}
            yield from (row for _, row in made.values())

    def make(self, model: str, case: Case, width: Width) -> dict[tuple, tuple[Path, dict]]:
        """Run one job: checkpoint and beginning of its row by label and width, nothing if it fails."""
        words = re.sub(r"\W+", "-", f"{model}-{case.label}-{width}")
        file = case.tool == "llamacpp" or case.options.get("method") == "gguf"
        out = self.folder / (f"{words}.gguf" if file else words)
        options, tokens, written = self.EVERY_JOB | case.job(width), self.tokens, 0.0
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
            samples = self.size[0] if self.args.quick else OWN_TEXTS
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

    def own_cases(self) -> list[Case]:
        chosen = OURS | dict(each.split("=", 1) for each in self.args.ours)
        found = [our_case(label, text) for label, text in chosen.items()]
        return [case for case in found if re.search(self.args.only, case.label)]

    def show(self) -> None:
        """Run everything, print the tables or put them where they belong."""
        peers = self.peers()
        ours = list(self.run(self.own_cases(), lambda *_: True))  # made anew each time
        for key, error in self.failed.items():
            print(f"failed: {key}: {error}", file=sys.stderr)
        tools = {f"{row['tool']} {row['versions'].get(row['tool'], '')}".strip() for row in [*peers, *ours]}
        note = f"CPU seconds of one thread. Versions: {', '.join(sorted(tools))}.\n"
        texts = [path.name for path in self.texts]
        for marker, text in self.sections(peers, ours, texts, note).items():
            if self.args.write and not self.args.only:
                write_section(marker, text, ROOT / "docs/measurements/other-tools.md")
            else:
                print(text)

    def sections(self, peers: list[dict], ours: list[dict], texts: list[str], note: str) -> dict[str, str]:
        """Marker -> Markdown: the best of both at every width, and all rows."""
        best, every = quality_tables(peers, ours, texts)
        about = (
            f"\nThe columns KL were measured on {texts[0]}: {self.limit:,} tokens, context {CONTEXT}. "
            f"All tools calibrate on the same {SAMPLES} × {SEQLEN} tokens. Rows with own text calibrate on "
            f"{OWN_TEXTS} × {SEQLEN} tokens that the model wrote (`quantkit sample`); their CPU seconds "
            f"include writing them. "
        )
        return {"peers": best + about + note, "peers-all": every}


class Real(Quality):
    """A pretrained model. Rows of quantkit are kept as well: `peer_pages.py` prints pages from them.

    The figures of a row are added text by text: an interrupted run goes on with `--keep`."""

    NAME, CASES = "real", REAL_CASES
    STORE = ROOT / "scripts/peers/real.json"
    SIZE, CONTEXT, LIMIT = (64, 512), 512, 10240
    EVERY_JOB = {"group_size": 64}  # 128 does not divide the model's 576 columns

    def originals(self) -> dict[str, Path]:
        return {self.args.model.name: self.args.model.absolute()}

    def measured_on(self) -> list[Path]:
        return [path.resolve() for path in self.args.text or [HELDOUT]]

    def protocol(self) -> dict:
        (path,) = self.models.values()
        weights = {self.args.model.name: sha256(path / "model.safetensors")}
        return super().protocol() | {"model": weights, "calibration_size": list(self.size)}

    def lacking(self, model: str, case: Case, width: Width, text: Path) -> bool:
        row = self.store.find(model, case.label, width)
        return not row or text.name not in row.get("kld", {})

    def show(self) -> None:
        """Run what is missing, then print the pages or put them where they belong."""
        ((model, base),) = self.models.items()
        rows, made = {}, {}
        for case in self.CASES:
            for width in case.widths:
                wanted = any(self.lacking(model, case, width, text) for text in self.texts)
                if wanted and re.search(self.args.peers, f"{case.label} {width}"):
                    for key, (path, row) in self.make(model, case, width).items():
                        made[key] = path
                        rows[key] = self.store.find(model, *key) or row
        original = {"model": model, "label": "original", "width": 16, "tool": ""}
        rows[None] = self.store.find(model, "original", 16) or original
        for text in self.texts:
            missing = {key: path for key, path in made.items() if text.name not in rows[key].get("kld", {})}
            if not missing:
                continue
            record = evaluated(base, missing.values(), text, self.CONTEXT, self.limit)
            for key, found in zip([None, *missing], record["models"], strict=True):
                row, size = rows[key], found["size"]
                for figure, part in (("ppl", "value"), ("kld", "mean")):
                    if values := found["metrics"][figure]:
                        row.setdefault(figure, {})[text.name] = round(values[part], 6)
                if found["metrics"]["kld"]:
                    row.setdefault("top1", {})[text.name] = round(found["metrics"]["top1"], 6)
                row |= {"weight_bytes": size["weight_bytes"], "bits": size["bits_per_quantized_weight"]}
                self.store.add(row)
        for key, error in self.failed.items():
            print(f"failed: {key}: {error}", file=sys.stderr)
        peer_pages.real(self.store.path, self.args.write)


class Formats(Quality):
    """The same for formats."""

    NAME, CASES = "formats", FORMAT_PEERS
    STORE = ROOT / "scripts/peers/formats.json"

    def own_cases(self) -> list[Case]:
        return list(FORMAT_OURS)

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
        head = [*LABELS, "bits/weight", *headings(texts, "KL"), *headings(texts, "ratio"), "CPU s"]
        head.append("ratio of CPU s")
        about = (
            f"\nActivations are rounded as clients round them. {self.limit:,} tokens, context {CONTEXT}. "
            f"Methods with calibration use the same {SAMPLES} × {SEQLEN} tokens. "
        )
        return {"formats": table(head, rows) + about + note}


def headings(texts: list[str], what: str) -> list[str]:
    """Headings of a figure on every text."""
    return [f"{what}, {text.removesuffix('.txt')}" for text in texts]


def _rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds >= 5 else 3)


def quality_tables(peers: list[dict], ours: list[dict], texts: list[str]) -> tuple[str, str]:
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
    kl, ratio = headings(texts, "KL"), headings(texts, "ratio")
    best_head = ["model, format", "best peer", "KL", "CPU s", "quantkit", "KL", "CPU s", *ratio]
    return table(best_head, best), table([*LABELS, "bits/weight", *kl, *ratio, "CPU s"], every)


def parse(benches: dict) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(benches)} (default: all but real)")
    for tool in ENVIRONMENTS:
        flag = "llmc" if tool == "llmcompressor" else tool
        parser.add_argument(f"--{flag}-python", dest=tool, metavar="PYTHON", help=f"of {tool}'s environment")
    parser.add_argument("--calibration", help="text to calibrate on (default: the shipped text)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    add_flags(parser.add_argument_group("quality"))
    args = parser.parse_args()
    if unknown := set(args.parts) - benches.keys():
        parser.error(f"no part is called {', '.join(unknown)}")
    args.parts = args.parts or [name for name in benches if name != Real.NAME]
    return args


def main() -> None:
    benches = {"gptq": bench_gptq, "awq": bench_awq}
    for part in (Quality, Formats, Real):
        benches[part.NAME] = lambda bench, part=part: part(bench, bench.args).show()
    args = parse(benches)
    given = {tool: getattr(args, tool) for tool in ENVIRONMENTS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given, Path(folder), args)
        if set(args.parts) & {"gptq", "awq"}:
            warm_up(bench, args.parts)
        for part in args.parts:
            benches[part](bench)
        print(", ".join(f"{tool} {version}" for tool, version in sorted(bench.versions.items())))


if __name__ == "__main__":
    main()
