"""quantkit against llm-compressor, GPTQModel and AutoAWQ: time, memory and loss on the same tokens.

    python scripts/bench_peers.py [gptq] [quality] [awq] [--quick] [--repeats N]

gptq: two random Llama blocks of 768/2048, 32 sequences of 512 tokens, 4 bit in groups of 128, default
options: CPU seconds at one thread, wall seconds at two, peak memory. quality: KL divergence on the demo
model at 4 and 3 bit. awq: one block, 4 and 16 sequences. The quantization phase is from tokens to solved
weights; imports, loading, saving and verification stand apart. Each tool runs in an environment of its
own, made on the first run unless a python is given. Machines are noisy: everything runs in turn, and
the least of the repeats counts.
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

import random_llama
from client_runs import DEMO, ROOT, Failed, run_script, table

SHAPE = {"hidden": 768, "intermediate": 2048, "heads": 12, "vocabulary": 32000}
QUICK_SHAPE = {"hidden": 256, "intermediate": 512, "heads": 4, "vocabulary": 4096}
ENVIRONMENTS = {  # name in clients-setup.sh, where it puts the python
    "llmcompressor": ("llmcompressor", ".venv-peers/llmcompressor/bin/python"),
    "gptqmodel": ("clients", ".venv-clients/bin/python"),
    "autoawq": ("legacy", ".venv-legacy/bin/python"),
}


@dataclass(frozen=True)
class Measured:
    """One run of one tool. Seconds of the quantization phase; `whole`: with loading and saving."""

    cpu: float
    wall: float
    whole: float
    peak_bytes: int


class Bench:
    """Runs jobs of every tool on one calibration block. pythons: tool -> interpreter."""

    def __init__(self, pythons: dict[str, str], folder: Path, args: argparse.Namespace):
        self.pythons, self.folder, self.args = pythons, folder, args
        self.versions: dict[str, str] = {}
        self._runs = 0

    def tokens(self, model: Path, samples: int, seqlen: int) -> Path:
        """The same block for every tool, cut as quantkit cuts it."""
        from quantkit.models.open import open_checkpoint
        from quantkit.options import CalibrationOptions
        from quantkit.text import calibration

        options = CalibrationOptions(self.args.calibration, samples=samples, seqlen=seqlen)
        rows = calibration.load(open_checkpoint(str(model)), options).tokens.tolist()
        path = self.folder / f"tokens-{samples}-{seqlen}.json"
        path.write_text(json.dumps(rows))
        return path

    def run(self, tool: str, model: Path, tokens: Path, **options) -> tuple[Measured, Path]:
        """One job in a process of its own; the checkpoint and what it took. Raises Failed."""
        self._runs += 1
        out = self.folder / f"{self._runs}-{tool}"
        request = {"model": str(model), "tokens": str(tokens), "out": str(out)} | options
        request["calibration"] = self.args.calibration
        path = self.folder / f"{self._runs}-{tool}.json"
        script = ROOT / f"scripts/peers/run_{tool}.py"
        pythonpath = str(ROOT) if tool == "quantkit" else ""
        run_script(self.pythons[tool], script, request, path, options.get("threads", 1), pythonpath)
        result = json.loads(path.with_suffix(".result.json").read_text())
        phases = result["phases"]
        whole = sum(phase["cpu"] for phase in phases.values())
        self.versions[tool] = result["versions"][tool]
        measured = Measured(
            phases["quantize"]["cpu"], phases["quantize"]["wall"], whole, result["peak_bytes"]
        )
        print(f"{tool} {options}: {measured}", file=sys.stderr, flush=True)
        return measured, out

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
                    pairs = zip(vars(old).values(), vars(new).values(), strict=True)
                    found[tool] = Measured(*(min(pair) for pair in pairs))
        return found


def make_model(bench: Bench, layers: int) -> Path:
    """A random Llama of the benchmark's shape."""
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


def bench_quality(bench: Bench) -> None:
    """KL divergence to the demo model, the same calibration tokens for all."""
    import torch

    from quantkit.errors import QuantkitError
    from quantkit.evaluation import evaluate
    from quantkit.evaluation import windows as windows_of
    from quantkit.models.open import open_checkpoint

    model = demo_model(bench)
    base = open_checkpoint(str(model))
    tokens = bench.tokens(model, *(8, 128) if bench.args.quick else (128, 256))
    windows = windows_of.load(base, bench.args.text, 256, None, 2048 if bench.args.quick else 40960)
    cases = [("llmcompressor", {}), ("gptqmodel", {}), ("gptqmodel", {"mse": 2.4}), ("quantkit", {})]
    rows = []
    for bits in (4, 3):
        losses: dict[bool, list[float]] = {True: [], False: []}  # by whether it is ours
        for tool, options in cases:
            label = f"{tool}{', mse' if options else ''}, {bits} bit"
            try:
                measured, out = bench.run(tool, model, tokens, method="gptq", bits=bits, **options)
                written = open_checkpoint(str(out))
                device = torch.device("cpu")
                result = evaluate.evaluate([base, written], windows, torch.float32, device).results[1]
            except (Failed, QuantkitError) as error:
                rows.append([label, "", "", f"failed: {error}"])
                continue
            kld = result.metrics.kld.mean
            losses[tool == "quantkit"].append(kld)
            rows.append([label, f"{result.size.weight_bytes:,}", f"{measured.cpu:.1f}", f"{kld:.5f}"])
        if all(losses.values()):
            ratio = losses[True][0] / min(losses[False])
            rows.append([f"**quantkit / best peer**, {bits} bit", "", "", f"{ratio:.2f}"])
    print("## Loss on the demo model\n")
    print(table(["", "weight bytes", "CPU s", "KL divergence"], rows))
    print(f"{windows.protocol.tokens} tokens of {windows.protocol.text}, context 256, float32.\n")


def main() -> None:
    benches = {"gptq": bench_gptq, "quality": bench_quality, "awq": bench_awq}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(benches)} (default: all)")
    parser.add_argument("--llmc-python")
    parser.add_argument("--gptqmodel-python")
    parser.add_argument("--autoawq-python")
    parser.add_argument("--calibration", help="text to calibrate on (default: the shipped text)")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    args = parser.parse_args()
    if unknown := set(args.parts) - benches.keys():
        parser.error(f"no part is called {', '.join(unknown)}")
    parts = args.parts or list(benches)
    given = {
        "llmcompressor": args.llmc_python,
        "gptqmodel": args.gptqmodel_python,
        "autoawq": args.autoawq_python,
    }
    pythons = {"quantkit": sys.executable}
    for tool, (name, place) in ENVIRONMENTS.items():
        if tool == "autoawq" and "awq" not in parts:
            continue
        pythons[tool] = given[tool] or str(ROOT / place)
        if not Path(pythons[tool]).exists():
            subprocess.run([str(ROOT / "scripts/clients-setup.sh"), name], check=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pythons, Path(folder), args)
        warm = make_model(bench, 1)  # GPTQModel compiles a packer once
        for tool in pythons:
            try:
                method = "awq" if tool == "autoawq" else "gptq"
                bench.run(tool, warm, bench.tokens(warm, 2, 32), method=method, sym=method == "gptq")
            except Failed as error:
                print(f"{tool}: {error}", file=sys.stderr)
        for part in parts:
            benches[part](bench)
        print(", ".join(f"{tool} {version}" for tool, version in sorted(bench.versions.items())))


if __name__ == "__main__":
    main()
