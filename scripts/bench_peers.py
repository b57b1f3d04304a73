"""quantkit against llm-compressor, GPTQModel, AutoRound, AutoAWQ and llama-quantize, on the same tokens.

    python scripts/bench_peers.py [gptq] [awq] [--quick] [--repeats N]
    python scripts/bench_peers.py quality --text frankenstein.txt --dtype float32 [--write]
        [--ours "NAME=METHOD,OPTION=VALUE"]
    python scripts/bench_peers.py formats --text frankenstein.txt --dtype float32 [--write]

gptq: two random Llama blocks of 768/2048, 32 sequences of 512 tokens, 4 bit in groups of 128, default
options: CPU seconds at one thread, wall seconds at two, peak memory. awq: one block, 4 and 16 sequences.
quality: KL divergence at 4, 3 and 2 bit and of GGUF types; formats: of FP8, W8A8 and NVFP4 (both in
peer_quality.py); what the others reached is kept in peers/*.json and not run again. The quantization phase
is from tokens to solved weights; imports, loading, saving and verification stand apart. Each tool runs in an
environment of its own, made on the first run unless a python is given. Machines are noisy: everything runs
in turn, and the least of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import peer_quality
import random_llama
from client_runs import DEMO, ROOT, Failed, run_script, table

SHAPE = {"hidden": 768, "intermediate": 2048, "heads": 12, "vocabulary": 32000}
QUICK_SHAPE = {"hidden": 256, "intermediate": 512, "heads": 4, "vocabulary": 4096}
ENVIRONMENTS = {  # name in clients-setup.sh, where it puts the python
    "llmcompressor": ("llmcompressor", ".venv-peers/llmcompressor/bin/python"),
    "gptqmodel": ("clients", ".venv-clients/bin/python"),
    "autoawq": ("legacy", ".venv-legacy/bin/python"),
    "autoround": ("autoround", ".venv-peers/autoround/bin/python"),
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
    random_llama.make(folder, layers=layers, context=2048, dtype=bench.args.dtype, spread=True, **shape)
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


def parse(benches: dict) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(benches)} (default: all)")
    for tool in ENVIRONMENTS:
        flag = "llmc" if tool == "llmcompressor" else tool
        parser.add_argument(f"--{flag}-python", dest=tool, metavar="PYTHON", help=f"of {tool}'s environment")
    parser.add_argument("--calibration", help="text to calibrate on (default: the shipped text)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    peer_quality.add_flags(parser.add_argument_group("quality"))
    args = parser.parse_args()
    if unknown := set(args.parts) - benches.keys():
        parser.error(f"no part is called {', '.join(unknown)}")
    args.parts = args.parts or list(benches)
    return args


def main() -> None:
    benches = {"gptq": bench_gptq, "awq": bench_awq}
    for part in (peer_quality.Quality, peer_quality.Formats):
        benches[part.NAME] = lambda bench, part=part: part(bench, bench.args, demo_model(bench)).show()
    args = parse(benches)
    given = {tool: getattr(args, tool) for tool in ENVIRONMENTS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given, Path(folder), args)
        if set(args.parts) - {"quality", "formats"}:
            warm_up(bench, args.parts)
        for part in args.parts:
            benches[part](bench)
        print(", ".join(f"{tool} {version}" for tool, version in sorted(bench.versions.items())))


if __name__ == "__main__":
    main()
