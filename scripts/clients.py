"""Checkpoints in the engines and tools that load them, on a CPU: each row is one `quantkit verify --engine`.

    scripts/clients-setup.sh clients mlx && python scripts/clients.py transformers llama.cpp mlx
    scripts/clients-setup.sh vllm && python scripts/clients.py vllm vllm-experts vllm-formats vllm-w4a8
    scripts/clients-setup.sh clients llmcompressor && python scripts/clients.py others

Writes sections of docs/measurements/clients.md.

transformers, llama.cpp, mlx: of every method that writes for this engine.
vLLM: of linears, of mixtures, of formats that accelerators run, of inputs in 8 bits.
others: each tool compresses the demo model in its own environment with its default options, and transformers
    loads the checkpoint in that environment.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from pathlib import Path

from common import DEMO, ROOT, Failed, served, table, verified, write_section
from interop.checkpoints import Cell, cells, make
from peers.jobs import python_of, run_job, write_tokens

from quantkit.models.files.headers import open_contents

COARSE = 0.1  # of what compression changed: a kernel may differ by as much
METHODS = "none | gptq | awq | gptq --layout compressed-tensors | fp8 | w8a8 | nf4 | int8"  # of transformers
FLOATS = "fp8 --format mxfp8 | fp4 | fp4 --format mxfp4"
MLX = """
    none | gptq --layout mlx | gptq --layout mlx @ dtype=float32 | awq --layout mlx | awq
    fp8 --format mxfp8 --layout mlx | fp4 --layout mlx | fp4 --format mxfp4 --layout mlx"""
DECODED = 'quantization_config={"dequantize": true}'
CELLS = {
    "transformers": cells(
        demo=f"""
            {METHODS} | {FLOATS} | gptq --bits 2 | gptq --bits 8 | gptq --group-size -1
            gptq --group-size -1 @ quantization_config={{"backend": "gptq_torch"}}
            gptq --act-order full | gptq --no-sym | gptq --override down_proj=8
            gptq --layout compressed-tensors @ {DECODED}
            gptq --layout compressed-tensors --bits 8 | gptq --layout compressed-tensors --no-sym
            gptq --layout compressed-tensors --no-sym @ {DECODED}
            gptq --layout compressed-tensors --override down_proj=8
            gptq --layout compressed-tensors --activations fp8
            gptq --layout compressed-tensors --activations int8 | fp8 --block 128 | fp8 --static
            fp8 --kv-cache | fp8 --layout deepseek | fp4 --activations | fp8 --layout modelopt""",
        qwen3_moe=f"""
            {METHODS} | {FLOATS} | gptq --layout compressed-tensors @ {DECODED} | fp8 @ {DECODED}
            fp8 --layout deepseek | fp4 --format mxfp4 @ {DECODED}""",
        smollm2=METHODS,
    ),
    "llama.cpp": cells(
        demo="""
            gguf -t F16 | gguf -t Q8_0 | gguf -t Q6_K | gguf -t Q4_K_M | gguf -t Q4_0 | gguf -t Q2_K
            gguf -t IQ4_XS | gguf -t IQ2_XS""",
        qwen3_moe="gguf -t F16 | gguf -t Q8_0 | gguf -t Q4_K_M",
        smollm2="gguf -t Q8_0 | gguf -t Q4_K_M",
    ),
    "mlx": cells(
        demo=f"""
            {MLX} | gptq --layout mlx --bits 2 | gptq --layout mlx --bits 3 | gptq --layout mlx --bits 8
            gptq | gptq --layout compressed-tensors""",
        qwen3_moe=MLX,
        smollm2="none | gptq --layout mlx | gptq --layout mlx @ dtype=float32",
    ),
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
        smollm2="none | gptq | awq | gptq --layout compressed-tensors",
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
        smollm2="fp8 | w8a8",
    ),
    "vllm-w4a8": cells(
        demo="""
            gptq --layout compressed-tensors --activations int8
            gptq --layout compressed-tensors --activations fp8""",
        qwen3_moe="gptq --layout compressed-tensors --activations int8",
        smollm2="gptq --layout compressed-tensors --activations int8",
    ),
}
HEADER = ["command", "model", "result", "from decode", "bound", "compression changed", "kernels"]
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


def option_of(cell: Cell, engine: str) -> str:
    """Return the option that an engine is given. In 16 bit many rounded activations turn over to the next
    value, so vLLM computes in float32 for fp8, where it can; its w8a8 for AMX takes bfloat16 alone."""
    if cell.option or engine != "vllm":
        return cell.option
    method, half = cell.command.split(" ")[0], {"deepseek", "modelopt"} & set(cell.command.split())
    dtype = {"w8a8": "bfloat16", "fp8": "bfloat16" if half else "float32"}.get(method, "float16")
    return f"dtype={dtype}"


def compared(cell: Cell, root: Path, engine: str, python: Path | str) -> list[str]:
    """Return the row of a checkpoint in an engine against quantkit's decode."""
    label = f"`{cell.command}`" if cell.command else cell.label
    row = [label + f", `{cell.option}`" * bool(cell.option), cell.source]
    option = option_of(cell, engine)
    try:
        folder = make(cell, root)
        log = root / engine / f"{folder.name} {option}.log".replace(" ", "_")
        made = verified(folder, log, engine, python, *(["--engine-option", option] if option else []))
    except Failed as error:
        fluff = r".* does not run [^ ]+: |^error: | hint: .*|\[rank0\]: "
        reason = re.sub(fluff, "", str(error)).rstrip(" :")
        return [*row, "refused", *[""] * 3, reason.replace("|", "\\|")]
    difference = math.nan if made["difference"] is None else made["difference"]
    changed = open_contents(str(folder)).manifest["loss"]["kld"] if cell.command else 0.0
    return [
        *row,
        "OK" if made["agrees"] else "coarse" if difference <= COARSE * changed else "FAIL",
        f"{difference:.1e}",
        f"{made['bound']:.1e}",
        f"{changed:.1e}" if cell.command else "",
        ", ".join(filter(None, (made["kernels"], made["dtype"]))) or "it does not say",
    ]


def compare(name: str, args: argparse.Namespace, root: Path) -> str:
    """Return the table of a section in an engine, and its notes."""
    rows, engine = [], name.partition("-")[0]
    for cell in CELLS[name]:
        if args.match in cell.name:
            rows.append(compared(cell, root, engine, args.python or python_of(engine)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return f"{table(HEADER, rows)}"


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


SECTIONS = dict.fromkeys(CELLS, compare) | {"others": foreign}


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
