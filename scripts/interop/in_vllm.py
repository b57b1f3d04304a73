"""quantkit's checkpoints in vLLM: log probabilities of the likeliest tokens against quantkit's decode."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import ROOT, Failed, run_script, table, versions
from interop.checkpoints import IDS, Cell, cells, make, own_logits
from peers.jobs import python_of

NEW_TOKENS, TOP = 12, 5
SIXTEEN_BIT = 1e-2  # nats: mean differences up to here are products in 16 bit, as without compression
SHARE = 0.1  # of compression's change: differences up to here are activations in 8 bit, beyond another model
# The same where all activations are rounded: an activation between two values turns over by the last place of
# a sum, and turns others over after it.
ROUNDED = 0.33
LINEARS = cells(
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
)
EXPERTS = cells(
    mixtral="""
        none | gptq | gptq --group-size 32 | gptq --group-size -1 | gptq --checkpoint-format gptq_v2
        gptq --layout compressed-tensors | gptq --layout compressed-tensors --group-size 64
        gptq --layout compressed-tensors --group-size 32
        gptq --layout compressed-tensors --group-size -1 | gptq --layout compressed-tensors --no-sym
        awq | awq --layout compressed-tensors --sym""",
    qwen3_moe="none | gptq | gptq --layout compressed-tensors",
    qwen2_moe="none | gptq | gptq --layout compressed-tensors",
)
FORMATS = cells(
    demo="""
        none | fp8 | fp8 --solver gptq | fp8 --static | fp8 --block 128 | fp8 --layout deepseek
        fp8 --kv-cache | fp8 --static --kv-cache | w8a8 | fp4 | fp4 --activations | fp4 --format mxfp4
        fp4 --format mxfp4 --activations | fp8 --layout modelopt | fp8 --static --layout modelopt
        fp8 --block 128 --layout modelopt | fp4 --layout modelopt | fp4 --activations --layout modelopt""",
    qwen2="fp8 | fp8 --static | w8a8",
    opt="fp8 | w8a8",
    mixtral="fp8 | fp8 --block 128 | w8a8 | fp4 --format mxfp4",
)
HEADER = ["command", "model", "result", "mean difference", "largest", "compression changed"]
HEADER += ["likeliest equal", "greedy equal"]


def as_vllm_rounds() -> None:
    """Let quantkit round as vLLM's CPU build does; by itself quantkit rounds as compressed-tensors does.

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


def request(jobs: list[dict]) -> dict:
    """Return the request to run_vllm.py."""
    return {"ids": IDS, "new_tokens": NEW_TOKENS, "top": TOP, "jobs": jobs}


def compare(folder: Path, source: Path, result: dict, share: float) -> list[str]:
    """Return table cells: log probabilities and greedy tokens of vLLM against quantkit's decode."""
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
    # each token is judged on vLLM's own continuation so far
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


def dtype_of(cell: Cell) -> str:
    """Return the dtype that vLLM computes in: float32 where activations are rounded. In 16 bit, differences
    turn many activations over to the next value, and hide whether they are rounded equally."""
    method = cell.command.partition(" ")[0]
    half = "deepseek" in cell.command or "modelopt" in cell.command  # vLLM takes these in 16 bit alone
    return "float32" if method in ("fp8", "w8a8") and not half else "float16"


def generate(
    cells: list[Cell], root: Path, args: argparse.Namespace
) -> tuple[dict[str, Path], dict[str, dict]]:
    """Return folders and vLLM's results by cell name; `error` where quantkit or vLLM refused."""
    folders, results, paths, jobs = {}, {}, {}, []
    for cell in cells:
        dtype = dtype_of(cell)
        path = root / "vllm" / f"{cell.name.replace(' ', '_')}.{dtype}.json"
        try:
            folders[cell.name] = make(cell, root)
        except Failed as error:
            results[cell.name] = {"error": str(error)}
            continue
        paths[cell.name] = path
        if not path.exists():
            jobs.append({"folder": str(folders[cell.name]), "dtype": dtype, "result": str(path)})
    if jobs:
        python, script = args.python or python_of("vllm"), ROOT / "scripts/interop/run_vllm.py"
        run_script(python, script, request(jobs), root / "vllm/jobs.json")
    crashed = {"error": "its process ended without a word"}
    for name, path in paths.items():
        results[name] = json.loads(path.read_text()) if path.exists() else crashed
    return folders, results


def section(all_cells: list[Cell], args: argparse.Namespace, root: Path) -> str:
    """Return the table of these cells and its notes."""
    cells = [cell for cell in all_cells if args.match in cell.name]
    folders, results = generate(cells, root, args)
    rounded = any(dtype_of(cell) == "float32" for cell in cells)
    rows, share = [], ROUNDED if rounded else SHARE
    for cell in cells:
        row = [f"`{cell.command}`" if cell.command else cell.label, cell.source]
        result = results[cell.name]
        if "error" in result:
            row += ["FAIL", " ".join(result["error"].split())[:300].replace("|", "\\|"), *[""] * 4]
        else:
            row += compare(folders[cell.name], make(Cell("", cell.source), root), result, share)
        rows.append(row)
        print(" | ".join(row), file=sys.stderr, flush=True)
    text = (
        f"{table(HEADER, rows)}\nDifferences of log probabilities in nats, over the {TOP} likeliest tokens "
        f"of {len(IDS) - 1} positions. OK: a mean difference of at most {SIXTEEN_BIT:g}, or of at most "
        f"{share:.0%} of *compression changed*. Measured with {versions(results)}, in float16"
    )
    return text + (" (rows with rounded activations: in float32).\n" if rounded else ".\n")
