"""Models larger than memory: every method under a hard limit, with its peak and what was predicted.

    python scripts/bench_big.py --work /tmp/big                       # the data-free methods and eval, whole
    python scripts/bench_big.py --work /tmp/big --blocks 1 --jobs gptq awq "gguf gptq"
    python scripts/bench_big.py --work /tmp/big --experts 64 --blocks 2 --jobs nf4 int8

Makes a synthetic checkpoint (random weights, sharded) of Llama 3.2 3B's shapes with so many blocks, or with
`--experts` a mixture of Qwen3-30B-A3B's, and runs each job as a process of its own with `--max-memory` and
under `ulimit -v` of the same size: who takes more fails. What is printed is the peak resident memory of that
process (ru_maxrss), what the job's plan said before anything was loaded, how often a byte of the weights was
read (loaded, copied as it lies, and once for the hash), and the seconds. `--write` puts the rows into
docs/measurements.md, beside those that are there. Takes 30 GB of disk; the models stay in `--work`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "tests/data/demo-llama-6m"
PAGE = ROOT / "docs/measurements.md"
BEGIN, END = "<!-- big -->", "<!-- /big -->"
COLUMNS = "model", "job", "tokens", "limit", "peak", "predicted", "measured / predicted", "read", "seconds"
INTERPRETER = 300 << 20  # see quantkit/capacity/job.py
HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 3072, 8192, 24, 8, 128256
JOBS = {
    "nf4": ["nf4"],
    "int8": ["int8", "--allow-unread"],
    "fp8": ["fp8"],
    "gguf rtn Q8_0": ["gguf", "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none"],
    "gguf rtn Q4_K_M": ["gguf", "-t", "Q4_K_M", "--solver", "rtn", "--imatrix", "none"],
    "gguf gptq": ["gguf", "-t", "Q4_K_M"],
    "gptq": ["gptq"],
    "gptq unscaled": ["gptq", "--transform", "none"],
    "awq": ["awq"],
    "awq of 4": ["awq", "--n-grid", "4", "--no-clip"],
    "eval": ["eval"],
}
CALIBRATED = ("gptq", "gptq unscaled", "awq", "awq of 4", "gguf gptq")
DEFAULT = ("nf4", "int8", "gguf rtn Q8_0", "eval")
CHILD = """
import atexit, json, runpy, sys
from quantkit.models.files import reading, safetensors_folder

found, (model, told), sys.argv = {"loaded": 0, "copied": 0}, sys.argv[1:3], ["quantkit", *sys.argv[3:]]
octets, raw = reading.octets, safetensors_folder.raw

def counted(file, offset, nbytes, name):
    found["loaded"] += nbytes * str(file).startswith(model)
    return octets(file, offset, nbytes, name)

def copied(info):
    found["copied"] += info.nbytes * str(info.file).startswith(model)
    return raw(info)

reading.octets, safetensors_folder.raw = counted, copied
atexit.register(lambda: open(told, "w").write(json.dumps(found)))
runpy.run_module("quantkit", run_name="__main__")
"""
EXPECTED = """
import sys
import torch
from quantkit.evaluation import memory
from quantkit.models.open import open_checkpoint
tokens, most = map(int, sys.argv[2:])
model, cpu = open_checkpoint(sys.argv[1]), torch.device("cpu")
print(memory.decide([model], torch.float32, cpu, tokens, min(4096, tokens), False, most)[1])
"""


@dataclass(frozen=True)
class Tensor:
    """One to be made. std: of its values, None for ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None


def tensors(blocks: int, experts: int) -> Iterator[Tensor]:
    """Of the model, in the order of its blocks."""
    hidden, inner, heads, kv = sizes(experts)
    yield Tensor("model.embed_tokens.weight", (VOCABULARY, hidden), 0.02)
    for index in range(blocks):
        at = f"model.layers.{index}."
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield Tensor(f"{at}self_attn.{name}_proj.weight", (rows * 128, hidden), 0.02)
        yield Tensor(f"{at}self_attn.o_proj.weight", (hidden, heads * 128), 0.02)
        if experts:
            yield Tensor(f"{at}self_attn.q_norm.weight", (128,), None)
            yield Tensor(f"{at}self_attn.k_norm.weight", (128,), None)
            yield Tensor(f"{at}mlp.gate.weight", (experts, hidden), 0.02)
        for owner in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
            yield Tensor(f"{at}{owner}.gate_proj.weight", (inner, hidden), 0.02)
            yield Tensor(f"{at}{owner}.up_proj.weight", (inner, hidden), 0.02)
            yield Tensor(f"{at}{owner}.down_proj.weight", (hidden, inner), 0.02)
        yield Tensor(f"{at}input_layernorm.weight", (hidden,), None)
        yield Tensor(f"{at}post_attention_layernorm.weight", (hidden,), None)
    yield Tensor("model.norm.weight", (hidden,), None)


def sizes(experts: int) -> tuple[int, int, int, int]:
    """Hidden and inner width, heads, and heads of keys and values: Llama 3.2 3B's or Qwen3-30B-A3B's."""
    return (2048, 768, 32, 4) if experts else (HIDDEN, INNER, HEADS, KV_HEADS)


def config(blocks: int, experts: int) -> dict:
    """Its config.json."""
    hidden, inner, heads, kv = sizes(experts)
    made = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks, "head_dim": 128,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16",
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    if not experts:
        return made | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    made |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    return made | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
    }


def make(folder: Path, blocks: int, experts: int, shard_bytes: int) -> int:
    """The checkpoint, a tensor in memory at a time; returns the bytes of its weights."""
    import torch

    from quantkit.models.files import safetensors_folder
    from quantkit.models.files.safetensors_folder import TensorInfo

    rows = {row.name: row for row in tensors(blocks, experts)}
    infos = [TensorInfo(r.name, "BF16", r.shape, folder, 0, 2 * count(r.shape)) for r in rows.values()]
    generator = torch.Generator().manual_seed(0)

    def data(info: TensorInfo) -> Iterator[memoryview]:
        row = rows[info.name]
        if row.std is None:
            values = torch.ones(row.shape)
        else:
            values = torch.randn(row.shape, generator=generator) * row.std
        yield values.bfloat16().view(torch.uint8).numpy().reshape(-1).data

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    safetensors_folder.write_folder(folder, infos, shard_bytes, data)
    (folder / "config.json").write_text(json.dumps(config(blocks, experts), indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    (folder / "made").touch()
    return sum(info.nbytes for info in infos)


def count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@dataclass(frozen=True)
class Measured:
    """What a job's process took: bytes, how often the model was read, seconds; code: its exit status."""

    peak: int
    read: float
    seconds: float
    code: int


def run(model: Path, name: str, out: Path, args: argparse.Namespace, nbytes: int) -> Measured:
    """One job under the limit."""
    told, began = out.parent / "read.json", time.monotonic()
    command = [sys.executable, "-c", CHILD, str(model), str(told), *arguments(model, name, out, args)]
    with open(out.parent / f"{out.name}.log", "w") as log:
        child = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, preexec_fn=limited(args))
        _, status, usage = os.wait4(child.pid, 0)
    read = json.loads(told.read_text())
    hashed = 0 if name == "eval" else nbytes
    times = (read["loaded"] + read["copied"] + hashed) / nbytes
    seconds = time.monotonic() - began
    return Measured(usage.ru_maxrss << 10, times, seconds, os.waitstatus_to_exitcode(status))


def arguments(model: Path, name: str, out: Path, args: argparse.Namespace) -> list[str]:
    """Of `quantkit`."""
    method, *rest = JOBS[name]
    limit = ["--max-memory", f"{args.limit:g}GB", "--quiet"]
    if name == "eval":
        text = ["--text", str(args.text), "--limit", str(args.eval_tokens), "--ctx", str(args.seqlen)]
        return ["eval", str(model), *text, *limit, "--json"]
    text = ["--samples", str(args.samples), "--seqlen", str(args.seqlen)] if name in CALIBRATED else []
    return [method, str(model), *rest, *text, *limit, "--json", "-o", str(out), "--overwrite"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def limited(args: argparse.Namespace) -> Callable[[], None]:
    """What a child does before it begins: `ulimit -v`."""
    nbytes = int(args.limit * 1e9)
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def expected(model: Path, name: str, out: Path, args: argparse.Namespace) -> int:
    """Bytes that the plan says the whole process takes."""
    if name == "eval":
        told = [str(model), str(args.eval_tokens), str(int(args.limit * 1e9))]
        command = [sys.executable, "-c", EXPECTED, *told]
    else:
        command = [sys.executable, "-m", "quantkit", *arguments(model, name, out, args), "--dry-run"]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, preexec_fn=limited(args)
    )
    above = (
        int(done.stdout.split()[-1]) if name == "eval" else json.loads(done.stdout)["plan"]["memory_bytes"]
    )
    return above + INTERPRETER


def row(title: str, name: str, args: argparse.Namespace, found: Measured, told: int) -> str:
    """A row of the table."""
    tokens = "–"
    if name in CALIBRATED:
        tokens = f"{args.samples} × {args.seqlen}"
    elif name == "eval":
        tokens = f"{args.eval_tokens:,}"
    figures = (
        title, name, tokens, f"{args.limit:g} GB",
        f"{found.peak / 1e9:.2f} GB" if not found.code else f"failed ({found.code})",
        f"{told / 1e9:.2f} GB", f"{found.peak / told:.2f}", f"{found.read:.2f} ×", f"{found.seconds:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(figures)} |"


def write(rows: list[str]) -> None:
    """Put rows into the page, in place of those of the same model, job and tokens."""
    page = PAGE.read_text()
    before, rest = page.split(f"{BEGIN}\n")
    table, after = rest.split(END)
    old = [
        line
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith(("| model", "| ---"))
    ]
    found = {key(line): line for line in [*old, *rows]}
    head = f"| {' | '.join(COLUMNS)} |\n| --- | --- |{' ---: |' * (len(COLUMNS) - 2)}"
    PAGE.write_text(before + "\n".join([BEGIN, head, *sorted(found.values(), key=key)]) + f"\n{END}" + after)


def key(line: str) -> tuple[str, ...]:
    return tuple(line.split(" | ")[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=Path("big"), help="where models and outputs lie meanwhile"
    )
    parser.add_argument("--jobs", nargs="+", default=list(DEFAULT), choices=list(JOBS))
    parser.add_argument("--blocks", type=int, default=56)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--limit", type=float, default=6.0, help="GB")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--eval-tokens", type=int, default=2048)
    parser.add_argument("--text", type=Path, default=next((ROOT / "calibration").glob("*.txt"), None))
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    kind = f"moe-{args.experts}" if args.experts else "llama"
    model = (args.work / f"{kind}-{args.blocks}").absolute()
    if not (model / "made").exists():
        make(model, args.blocks, args.experts, 2 * 10**9)
    nbytes = sum(2 * count(tensor.shape) for tensor in tensors(args.blocks, args.experts))
    title = f"{args.experts} experts, " if args.experts else ""
    title += f"{args.blocks} block{'s' * (args.blocks > 1)}, {nbytes / 1e9:.2f} GB"
    for name in args.jobs:
        out = model.parent / f"out-{name.replace(' ', '-')}"
        told = expected(model, name, out, args)
        found = run(model, name, out, args, nbytes)
        line = row(title, name, args, found, told)
        print(line, flush=True)
        if args.write and not found.code:
            write([line])
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
