"""quantkit's checkpoints in vLLM on a CPU: one process per checkpoint, compared with quantkit's own decode.

    scripts/clients-setup.sh vllm && python scripts/clients_vllm.py [vllm | vllm-experts]

Writes sections of docs/clients.md: `vllm` of linears, `vllm-experts` of mixtures. The log probabilities of
the likeliest prompt tokens are compared with those of quantkit's decode in float32; vLLM computes in 16 bit,
so a row of the model that was not compressed shows how far apart the two are without any compression, and a
column how far compression itself moved them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from client_cells import IDS, Cell, make, own_logits
from client_runs import ROOT, Failed, run_script, table, versions, write_section

NEW_TOKENS, TOP = 12, 5
SIXTEEN_BIT = 1e-2  # nats: mean differences up to here are products in 16 bit, as without compression
SHARE = 0.1  # of what compression changed: up to here they are activations in 8 bit, beyond another model
# The same where all activations are rounded: one that lies between two values turns over by the last place of
# a sum, and turns others over behind it.
ROUNDED = 0.33
LINEARS = [
    Cell(""),
    Cell("gptq"),
    Cell("gptq --group-size 32"),
    Cell("gptq --group-size -1"),
    Cell("gptq --checkpoint-format gptq_v2"),
    Cell("", "qwen2"),
    Cell("gptq", "qwen2"),
    Cell("", "opt"),
    Cell("gptq --group-size 32", "opt"),
    Cell("awq"),
    Cell("awq --no-zero-point"),
    Cell("awq", "qwen2"),
    Cell("gptq --layout compressed-tensors"),
    Cell("gptq --layout compressed-tensors --group-size -1"),
    Cell("gptq --layout compressed-tensors --no-sym"),
    Cell("gptq --layout compressed-tensors --no-sym --group-size -1"),
    Cell("awq --layout compressed-tensors"),
    Cell("gptq --layout compressed-tensors", "qwen2"),
]
EXPERTS = [
    Cell("", "mixtral"),
    Cell("gptq", "mixtral"),
    Cell("gptq --group-size 32", "mixtral"),
    Cell("gptq --group-size -1", "mixtral"),
    Cell("gptq --checkpoint-format gptq_v2", "mixtral"),
    Cell("gptq --layout compressed-tensors", "mixtral"),
    Cell("gptq --layout compressed-tensors --group-size 64", "mixtral"),
    Cell("gptq --layout compressed-tensors --group-size 32", "mixtral"),
    Cell("gptq --layout compressed-tensors --group-size -1", "mixtral"),
    Cell("gptq --layout compressed-tensors --no-sym", "mixtral"),
    Cell("awq", "mixtral"),
    Cell("awq --layout compressed-tensors --no-zero-point", "mixtral"),
    Cell("", "qwen3_moe"),
    Cell("gptq", "qwen3_moe"),
    Cell("gptq --layout compressed-tensors", "qwen3_moe"),
    Cell("", "qwen2_moe"),
    Cell("gptq", "qwen2_moe"),
    Cell("gptq --layout compressed-tensors", "qwen2_moe"),
]
FORMATS = [
    Cell(""),
    Cell("fp8"),
    Cell("fp8 --solver gptq"),
    Cell("fp8 --static"),
    Cell("fp8 --block 128"),
    Cell("fp8 --layout deepseek"),
    Cell("fp8 --kv-cache"),
    Cell("fp8 --static --kv-cache"),
    Cell("w8a8"),
    Cell("fp4"),
    Cell("fp4 --activations"),
    Cell("fp4 --format mxfp4"),
    Cell("fp4 --format mxfp4 --activations"),
    Cell("fp8", "qwen2"),
    Cell("fp8 --static", "qwen2"),
    Cell("w8a8", "qwen2"),
    Cell("fp8", "opt"),
    Cell("w8a8", "opt"),
    Cell("fp8", "mixtral"),
    Cell("fp8 --block 128", "mixtral"),
    Cell("w8a8", "mixtral"),
    Cell("fp4 --format mxfp4", "mixtral"),
]
SECTIONS = {"vllm": LINEARS, "vllm-experts": EXPERTS, "vllm-formats": FORMATS}


def as_vllm_rounds() -> None:
    """What its CPU build does otherwise than quantkit, which goes by compressed-tensors.

    Steps of activations in int8 are absmax / 127, not absmax / 127.5. Keys and values in fp8 are cut off
    towards zero, not rounded to the nearest.
    """
    import torch

    from quantkit.evaluation import kv_rounding
    from quantkit.layouts.compressed_tensors import activations

    ends = activations._ends

    def symmetric(numbers) -> tuple[float, float]:
        least, most = ends(numbers)
        return (-most, most) if numbers.kind == "int" and numbers.symmetric else (least, most)

    def cut_off(scale: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        states, most = states / scale, torch.finfo(torch.float8_e4m3fn).max
        exponent = torch.frexp(states).exponent.clamp(min=-5)
        step = torch.ldexp(torch.ones_like(states), exponent - 4)
        return (torch.trunc(states / step) * step).clamp(-most, most) * scale

    activations._ends, kv_rounding._fp8_scaled = symmetric, cut_off


def compare(folder: Path, source: Path, result: dict, share: float) -> list[str]:
    """Log probabilities and greedy tokens of the client against quantkit's decode, as table cells."""
    tokens = result["tokens"]
    logits = own_logits(folder, IDS + tokens[:-1])
    expected = logits.log_softmax(-1)
    before = own_logits(source, IDS).log_softmax(-1)
    differences, changes, best = [], [], 0
    for position, likely in enumerate(result["prompt_logprobs"]):
        for token, value in likely.items():
            own = expected[position, int(token)].item()
            differences.append(abs(value - own))
            changes.append(abs(before[position, int(token)].item() - own))
        best += max(likely, key=likely.get) == str(expected[position].argmax().item())
    mean, changed = sum(differences) / len(differences), sum(changes) / len(changes)
    # each token is judged on the client's own continuation so far
    greedy = expected[len(IDS) - 1 :][: len(tokens)]
    equal = sum(int(row.argmax()) == token for row, token in zip(greedy, tokens, strict=True))
    behind = max((row.max() - row[token]).item() for row, token in zip(greedy, tokens, strict=True))
    return [
        "OK" if mean <= max(SIXTEEN_BIT, share * changed) else "FAIL",
        f"{mean:.1e}",
        f"{max(differences):.1e}",
        f"{changed:.1e}",
        f"{best}/{len(IDS) - 1}",
        f"{equal}/{len(tokens)}" + (f" (at most {behind:.1e} behind)" if behind else ""),
    ]


def generate(
    cells: list[Cell], root: Path, args: argparse.Namespace
) -> tuple[dict[str, Path], dict[str, dict]]:
    """Folders and the client's results by cell name; `error` where quantkit or vLLM refused."""
    folders, results, paths, jobs = {}, {}, {}, []
    for cell in cells:
        ending = "as-is.json" if args.as_is else "json"
        dtype = args.dtype or dtype_of(cell)
        path = root / "vllm" / f"{cell.name.replace(' ', '_')}.{dtype}.{ending}"
        try:
            folders[cell.name] = make(cell, root)
        except Failed as error:
            results[cell.name] = {"error": str(error)}
            continue
        paths[cell.name] = path
        if not path.exists():
            jobs.append({"folder": str(folders[cell.name]), "dtype": dtype, "result": str(path)})
    if jobs:
        request = {"ids": IDS, "new_tokens": NEW_TOKENS, "top": TOP, "as_is": args.as_is}
        script = ROOT / "scripts/clients/run_vllm.py"
        run_script(args.python, script, request | {"jobs": jobs}, root / "vllm" / "jobs.json")
    crashed = {"error": "its process ended without a word"}
    for name, path in paths.items():
        results[name] = json.loads(path.read_text()) if path.exists() else crashed
    return folders, results


def dtype_of(cell: Cell) -> str:
    """What vLLM is to compute in. Where activations are rounded, differences in 16 bit turn many of them over
    to the next value, and hide whether they are rounded alike."""
    method = cell.command.partition(" ")[0]
    return "float32" if method in ("fp8", "w8a8") and "deepseek" not in cell.command else "float16"


def section(cells: list[Cell], root: Path, args: argparse.Namespace) -> str:
    """The table of these cells, and what has to be said of it."""
    folders, results = generate(cells, root, args)
    rows, share = [], ROUNDED if any(dtype_of(cell) == "float32" for cell in cells) else SHARE
    for cell in cells:
        line = [f"`{cell.command}`" if cell.command else "not compressed", cell.source]
        result = results[cell.name]
        if "error" in result:
            line += ["FAIL", " ".join(result["error"].split())[:300].replace("|", "\\|"), *[""] * 4]
        else:
            source = make(Cell("", cell.source), root)
            line += compare(folders[cell.name], source, result, share)
        rows.append(line)
        print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["command", "model", "", "mean difference", "largest", "compression changed"]
    header += ["likeliest equal", "greedy equal"]
    text = (
        f"{table(header, rows)}\nDifferences of log probabilities in nats, over the {TOP} likeliest tokens "
    )
    text += f"of {len(IDS) - 1} positions; OK: a mean up to {SIXTEEN_BIT:g}, or to {share:.0%} of what "
    text += f"compression changed. Measured with {versions(results)}, {args.dtype or 'float16'}"
    if not args.dtype and any(dtype_of(cell) == "float32" for cell in cells):
        text += ", where activations are rounded float32"
    text += ".\n"
    ran = [result for result in results.values() if "own_product" in result]
    if not args.as_is and not all(result["own_product"] for result in ran):
        text += "This machine has no AVX-512, for which alone vLLM builds its int4 product: a literal one in "
        text += "torch stood in for it. Reading and repacking are vLLM's own.\n"
    if (
        not args.as_is
        and any(cell in EXPERTS for cell in cells)
        and not all(result["tiles"] for result in ran)
    ):
        text += (
            "This machine has no AMX, without which vLLM refuses int4 experts: it was told to take them all "
        )
        text += "the same. Reading, repacking and the product, which needs AVX-512 alone, are vLLM's own.\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all"
    )
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--dtype", help="default: float32 where activations are rounded, else float16")
    parser.add_argument("--keep", type=Path, help="keep checkpoints and results here, and use what is there")
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument(
        "--as-is", action="store_true", help="let vLLM refuse what this machine is no match for"
    )
    parser.add_argument("--no-write", action="store_true", help="leave docs/clients.md alone")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section is called {min(unknown)}")
    as_vllm_rounds()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        for name in args.sections or SECTIONS:
            text = section([cell for cell in SECTIONS[name] if args.match in cell.name], root, args)
            if args.no_write:
                print(text)
            else:
                write_section(name, text)


if __name__ == "__main__":
    main()
