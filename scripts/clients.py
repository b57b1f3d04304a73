"""Checkpoints in the engines and tools that load them, on a CPU: each row is one `quantkit eval --engine`.

    scripts/clients-setup.sh vllm && python scripts/clients.py [vllm] [vllm-experts] [vllm-formats]
    scripts/clients-setup.sh clients llmcompressor && python scripts/clients.py others

Writes sections of docs/measurements/clients.md.

vLLM: of linears, of mixtures, of formats that accelerators run.
others: each tool compresses the demo model in its own environment with its default options, and transformers
    loads the checkpoint in that environment.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from common import DEMO, ROOT, Failed, quantkit_logged, served, table, write_section
from interop.checkpoints import Cell, cells, make
from peers.jobs import python_of, run_job, write_tokens

COARSE = 0.1  # of what compression changed: a kernel may differ by as much
TEXT = ("--ctx", "128", "--limit", "1024")
VLLM = {
    "vllm": cells(
        demo="""
            none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
            awq | awq --sym | gptq --layout compressed-tensors
            gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
            gptq --layout compressed-tensors --no-sym --group-size -1 | awq --layout compressed-tensors""",
        qwen2="none | gptq | awq | gptq --layout compressed-tensors",
        opt="none | gptq --group-size 32",
        llama_bias="""
            none | gptq --group-size 64 --head 8 | gptq --group-size 64 --head 4
            gptq --group-size 64 --layout compressed-tensors --head 8
            awq --group-size 64 --layout compressed-tensors --head 4""",
    ),
    "vllm-experts": cells(
        mixtral="""
            none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
            gptq --layout compressed-tensors | gptq --layout compressed-tensors --group-size 64
            gptq --layout compressed-tensors --group-size 32
            gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
            awq | awq --layout compressed-tensors --sym""",
        qwen3_moe="none | gptq | gptq --layout compressed-tensors",
        qwen2_moe="none | gptq | gptq --layout compressed-tensors",
    ),
    "vllm-formats": cells(
        demo="""
            none | fp8 | fp8 --solver gptq | fp8 --static | fp8 --block 128 | fp8 --layout deepseek
            fp8 --kv-cache | fp8 --static --kv-cache | w8a8 | fp4 | fp4 --activations | fp4 --format mxfp4
            fp4 --format mxfp4 --activations | fp8 --layout modelopt | fp8 --static --layout modelopt
            fp8 --block 128 --layout modelopt | fp4 --layout modelopt
            fp4 --activations --layout modelopt""",
        qwen2="fp8 | fp8 --static | w8a8",
        opt="fp8 | w8a8",
        mixtral="fp8 | fp8 --block 128 | w8a8 | fp4 --format mxfp4",
    ),
}
HEADER = ["command", "model", "result", "from decode", "largest", "compression changed", "kernels"]
G128 = {"method": "gptq"}
FOREIGN = {  # checkpoint: tool, options of a job of peers/run.py
    "GPTQ 4 bit g128": ("gptqmodel", G128),
    "GPTQ 3 bit g128": ("gptqmodel", G128 | {"bits": 3}),
    "GPTQ 4 bit g128, desc_act": ("gptqmodel", G128 | {"desc_act": True}),
    "GPTQ W4A16 g128": ("llmcompressor", G128),
    "GPTQ W4A16 g128, asymmetric": ("llmcompressor", G128 | {"sym": False}),
    "AWQ W4A16 g128": ("llmcompressor", {"method": "awq", "sym": False}),
    "W8A8 int8, activations too": ("llmcompressor", {"method": "W8A8"}),
    "FP8 dynamic, activations too": ("llmcompressor", {"method": "FP8_DYNAMIC"}),
    "LLM.int8, activations too": ("bitsandbytes", {"method": "int8"}),
    "NF4": ("bitsandbytes", {"method": "nf4"}),
    "NF4, double quantization": ("bitsandbytes", {"method": "nf4-double"}),
}
SAMPLES, SEQLEN = 16, 256  # the readers are under test here, not the tools


def dtype_of(cell: Cell) -> str:
    """Return the dtype that vLLM computes in. In 16 bit many rounded activations turn over to the next value,
    so it is float32 for fp8, where vLLM has it; its w8a8 for AMX takes bfloat16 alone."""
    method, half = cell.command.split(" ")[0], {"deepseek", "modelopt"} & set(cell.command.split())
    return {"w8a8": "bfloat16", "fp8": "bfloat16" if half else "float32"}.get(method, "float16")


def compared(cell: Cell, root: Path, python: Path | str) -> list[str]:
    """Return the cells of a checkpoint in vLLM against quantkit's decode."""
    row = [f"`{cell.command}`" if cell.command else cell.label, cell.source]
    dtype = dtype_of(cell)
    computing = "--engine-option", f"dtype={dtype}"
    log = root / "vllm" / f"{cell.name.replace(' ', '_')}.{dtype}.log"
    folder = Path()
    try:
        folder, source = make(cell, root), make(Cell("", cell.source), root)
        models = [source, folder] if cell.command else [source]
        record = served(models, log, "vllm", python, *TEXT, *computing)
    except Failed as error:
        of_engine = str(error).partition(f"{folder}: ")[2].partition(" hint: ")[0]
        return [*row, "FAIL", of_engine or str(error), "", "", ""]
    decoded = record["models"][2:]
    engine = record["models"][-1]["engine"]
    difference = {key: math.nan if value is None else value for key, value in engine["difference"].items()}
    changed = decoded[0]["metrics"]["kld"]["mean"] if cell.command else 0.0
    fine = not cell.command or agrees(folder, source, log, "--python", str(python), *computing)
    return [
        *row,
        "OK" if fine else "coarse" if difference["mean"] <= COARSE * changed else "FAIL",
        f"{difference['mean']:.1e}",
        f"{difference['max']:.1e}",
        f"{changed:.1e}" if cell.command else "",
        f"{engine['kernels']}, {engine['dtype']}",
    ]


def agrees(folder: Path, source: Path, log: Path, *flags: str) -> bool:
    """Return whether `verify --engine` finds that vLLM computes what the checkpoint holds."""
    command = ["verify", str(folder), "--base", str(source), "--engine", "vllm", "-q", *flags]
    try:
        quantkit_logged(command, log.with_suffix(".verify.log"))
    except Failed:
        return False
    return True


def vllm(name: str, args: argparse.Namespace, root: Path) -> str:
    """Return the table of a section in vLLM, and its notes."""
    rows = []
    for cell in VLLM[name]:
        if args.match in cell.name:
            rows.append(compared(cell, root, args.python or python_of("vllm")))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return (
        f"{table(HEADER, rows)}\nKL divergences in nats per token, over 1,016 tokens of heldout.txt. OK: "
        "`verify --engine` finds no fault. "
        f"coarse: it does, but the divergence is at most {COARSE:.0%} of *compression changed*.\n"
    )


def foreign(name: str, args: argparse.Namespace, root: Path) -> str:
    """Return the table of other tools' checkpoints."""
    tokens, rows = root / "tokens.json", []
    write_tokens(DEMO, tokens, SAMPLES, SEQLEN)
    for label, (tool, options) in FOREIGN.items():
        if args.match not in f"{tool} {label}":
            continue
        folder = root / f"{tool} {label}".replace(" ", "-")
        python = args.python or python_of("llmcompressor" if tool == "llmcompressor" else "transformers")
        try:
            run_job(tool, DEMO, tokens, folder, **options)
            log = folder.with_suffix(".eval.log")
            record = served(
                [folder], log, "transformers", python, "--ctx", "256", "--engine-option", "dtype=float32"
            )
            ours, theirs = (f"{model['metrics']['ppl']['value']:.3f}" for model in record["models"])
            engine = record["models"][1]["engine"]
            cells = [theirs, ours, f"{engine['difference']['mean']:.1e}", engine["kernels"]]
        except Failed as error:
            cells = [f"failed: {error}", "", "", ""]
        rows.append([tool, label, *cells])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["tool", "checkpoint", "transformers", "`quantkit eval`", "KL divergence", "kernels"]
    return f"Perplexity on heldout.txt, windows of 256 tokens.\n\n{table(header, rows)}"


SECTIONS = dict.fromkeys(VLLM, vllm) | {"others": foreign}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    add("--python", help="of the client's environment (default: where clients-setup.sh makes it)")
    add("--keep", type=Path, help="keep checkpoints and results here, and use those that exist")
    add("--match", default="", help="only rows whose name contains this; the page stays as it is")
    add("--no-write", action="store_true", help="leave the page as it is")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {min(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        for name in args.sections or SECTIONS:
            text = SECTIONS[name](name, args, root)
            if args.no_write or args.match:
                print(text)
            else:
                write_section(name, text, ROOT / "docs/measurements/clients.md")


if __name__ == "__main__":
    main()
