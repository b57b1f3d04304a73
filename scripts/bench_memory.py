"""Peak memory of jobs against what was planned, against depth and experts, and under a hard limit.

    python scripts/bench_memory.py                                        # 4 and 32 blocks: no growth
    python scripts/bench_memory.py --hidden 1024 --inner 512 --experts 8 64 --blocks 1
    python scripts/bench_memory.py --hidden 3072 --inner 8192 --heads 24 --key-values 8 --vocabulary 128256 \\
        --blocks 56 --limit 6 --jobs nf4 int8 gguf-rtn eval --work big    # larger than memory

Makes random checkpoints in bfloat16, of Llama's shape or with `--experts` of Qwen3-MoE's, a block in memory
at a time, and runs each job in a process of its own. Printed are the peak resident memory of that process
(ru_maxrss), what `--dry-run` said before anything was loaded, and the seconds. With `--limit` each runs with
`--max-memory` and under `ulimit -v` of so many GB: one that takes more fails. Exit code 1 where a job fails,
or its peak is more than a quarter above the plan, which interpreters may take, or below `--least` of it. The
models stay in `--work`.
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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "tests/data/demo-llama-6m"
INTERPRETER = 300 << 20  # Python, torch and transformers: see quantkit/capacity/job.py
TEXT = next((ROOT / "calibration").glob("*.txt"))
JOBS = {
    "nf4": ["nf4"],
    "int8": ["int8", "--allow-unread"],
    "fp8": ["fp8"],
    "gguf-rtn": ["gguf", "-t", "Q8_0", "--solver", "rtn", "--imatrix", "none"],
    "gguf": ["gguf", "-t", "Q4_K_M"],
    "gptq": ["gptq"],
    "gptq-unscaled": ["gptq", "--transform", "none"],
    "gptq-repeat": ["gptq", "--sequential", "repeat"],
    "awq": ["awq"],
    "eval": ["eval"],
}
CALIBRATED = ("gguf", "gptq", "gptq-unscaled", "gptq-repeat", "awq")


def shapes(args: argparse.Namespace, block: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return name and shape of every tensor of a block."""
    at, hidden, inner, key_values = (
        f"model.layers.{block}.",
        args.hidden,
        args.inner,
        args.key_values or args.heads,
    )
    width = args.hidden // args.heads if not experts else 64
    for name, heads in (("q", args.heads), ("k", key_values), ("v", key_values)):
        yield f"{at}self_attn.{name}_proj.weight", (heads * width, hidden)
    yield f"{at}self_attn.o_proj.weight", (hidden, args.heads * width)
    if experts:
        yield f"{at}self_attn.q_norm.weight", (width,)
        yield f"{at}self_attn.k_norm.weight", (width,)
        yield f"{at}mlp.gate.weight", (experts, hidden)
    for owner in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        yield f"{at}{owner}.gate_proj.weight", (inner, hidden)
        yield f"{at}{owner}.up_proj.weight", (inner, hidden)
        yield f"{at}{owner}.down_proj.weight", (hidden, inner)
    yield f"{at}input_layernorm.weight", (hidden,)
    yield f"{at}post_attention_layernorm.weight", (hidden,)


def config(args: argparse.Namespace, blocks: int, experts: int) -> dict:
    """Return the config.json of the random model."""
    made = {
        "hidden_size": args.hidden, "intermediate_size": args.inner, "num_hidden_layers": blocks,
        "num_attention_heads": args.heads, "num_key_value_heads": args.key_values or args.heads,
        "head_dim": 64 if experts else args.hidden // args.heads, "vocab_size": args.vocabulary,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16",
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    if not experts:
        return made | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    made |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": args.inner}
    return made | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def make(args: argparse.Namespace, blocks: int, experts: int) -> Path:
    """Write the checkpoint, a shard for each block, and return its folder."""
    import torch
    from safetensors.torch import save_file

    name = f"{args.hidden}-{args.inner}-{args.heads}-{args.key_values}-{args.vocabulary}-{blocks}-{experts}"
    folder = args.work.absolute() / name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rows = [[("model.embed_tokens.weight", (args.vocabulary, args.hidden))]]
    rows += [list(shapes(args, block, experts)) for block in range(blocks)]
    rows.append([("model.norm.weight", (args.hidden,))])
    places = {}
    for number, wanted in enumerate(rows):
        file = f"model-{number:05d}.safetensors"
        made = {
            name: (torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)).bfloat16()
            for name, shape in wanted
        }
        save_file(made, folder / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
    (folder / "config.json").write_text(json.dumps(config(args, blocks, experts)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    index.write_text(json.dumps({"weight_map": places}))
    return folder


def command(args: argparse.Namespace, model: Path, name: str, out: Path) -> list[str]:
    """Return the command line of one job."""
    method, *rest = JOBS[name]
    line = [sys.executable, "-m", "quantkit", method, str(model), *rest, "--quiet", "--json"]
    line += ["--max-memory", f"{args.limit:g}GB"] if args.limit else []
    if name == "eval":
        return [*line, "--text", str(TEXT), "--limit", str(args.eval_tokens), "--ctx", str(args.seqlen)]
    line += ["--samples", str(args.samples), "--seqlen", str(args.seqlen)] if name in CALIBRATED else []
    return [*line, "-o", str(out), "--overwrite"]


def measure(args: argparse.Namespace, model: Path, name: str) -> tuple[int, int | None, float, int]:
    """Run one job; return peak bytes, planned bytes (None for eval: no dry run), seconds, exit code."""
    out = args.work.absolute() / ("out.gguf" if name.startswith("gguf") else "out")
    line = command(args, model, name, out)
    nbytes = int(args.limit * 1e9)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def limited() -> None:
        if nbytes:
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))

    planned = None
    if name != "eval":
        planning = subprocess.run(
            [*line, "--dry-run"], env=environment, stdout=subprocess.PIPE, check=True, preexec_fn=limited
        )
        planned = json.loads(planning.stdout)["plan"]["memory_bytes"] + INTERPRETER
    began = time.monotonic()
    with open(out.with_suffix(".log"), "w") as log:
        child = subprocess.Popen(line, env=environment, stdout=log, stderr=log, preexec_fn=limited)
        _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - began
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return usage.ru_maxrss << 10, planned, seconds, os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("memory"), help="where models and outputs lie")
    parser.add_argument("--jobs", nargs="+", default=["gptq", "nf4", "gguf-rtn"], choices=list(JOBS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--experts", type=int, nargs="+", default=[0])
    for name, default in [
        ("hidden", 1024), ("inner", 2816), ("heads", 16), ("key-values", 0), ("vocabulary", 4096),
        ("samples", 8), ("seqlen", 256), ("eval-tokens", 2048),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=float, default=0, help="GB of address space (default: none)")
    parser.add_argument("--least", type=float, default=0.5)
    args = parser.parse_args()
    wrong = False
    print("| blocks | experts | model | job | peak | planned | peak / planned | seconds |")
    print(f"| ---: | ---: | ---: | --- |{' ---: |' * 4}")
    for name in args.jobs:
        for blocks in args.blocks:
            for experts in args.experts:
                model = make(args, blocks, experts)
                peak, planned, seconds, code = measure(args, model, name)
                size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
                off = peak / planned if planned else 1.0
                wrong = wrong or bool(code) or not args.least <= off <= 1.25
                cells = [
                    str(blocks), str(experts), f"{size / 1e9:.2f} GB", name,
                    f"failed ({code})" if code else f"{peak / 1e9:.3f} GB",
                    f"{planned / 1e9:.3f} GB" if planned else "–", f"{off:.2f}", f"{seconds:.0f}",
                ]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
