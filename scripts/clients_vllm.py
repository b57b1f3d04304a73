"""quantkit's checkpoints in vLLM on a CPU: one process per checkpoint, compared with quantkit's own decode.

    scripts/clients-setup.sh vllm && python scripts/clients_vllm.py [--python .venv-vllm/bin/python]

Writes the section `vllm` of docs/clients.md. The log probabilities of the likeliest prompt tokens are
compared with those of quantkit's decode in float32; vLLM computes in 16 bit, so a row of the model that
was not compressed shows how far apart the two are without any compression.
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
CELLS = [
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


def compare(folder: Path, result: dict) -> list[str]:
    """Log probabilities and greedy tokens of the client against quantkit's decode, as table cells."""
    tokens = result["tokens"]
    logits = own_logits(folder, IDS + tokens[:-1])
    expected = logits.log_softmax(-1)
    differences, best = [], 0
    for position, likely in enumerate(result["prompt_logprobs"]):
        for token, value in likely.items():
            differences.append(abs(value - expected[position, int(token)].item()))
        best += max(likely, key=likely.get) == str(expected[position].argmax().item())
    # each token is judged on the client's own continuation so far
    greedy = expected[len(IDS) - 1 :]
    equal = sum(int(row.argmax()) == token for row, token in zip(greedy, tokens, strict=True))
    behind = max((row.max() - row[token]).item() for row, token in zip(greedy, tokens, strict=True))
    return [
        f"{sum(differences) / len(differences):.1e}",
        f"{max(differences):.1e}",
        f"{best}/{len(IDS) - 1}",
        f"{equal}/{len(tokens)}" + (f" (at most {behind:.1e} behind)" if behind else ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=".venv-vllm/bin/python")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--keep", type=Path, help="keep checkpoints and results here, and use what is there")
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument("--no-write", action="store_true", help="leave docs/clients.md alone")
    args = parser.parse_args()
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        for cell in CELLS:
            if args.match not in cell.name:
                continue
            line = [f"`{cell.command}`" if cell.command else "not compressed", cell.source]
            try:
                folder = make(cell, root)
                path = root / "vllm" / f"{cell.name.replace(' ', '_')}.{args.dtype}.json"
                job = {"folder": str(folder), "dtype": args.dtype, "ids": IDS}
                job |= {"new_tokens": NEW_TOKENS, "top": TOP}
                if not path.with_suffix(".result.json").exists():
                    run_script(args.python, ROOT / "scripts/clients/run_vllm.py", job, path)
                results[cell.name] = json.loads(path.with_suffix(".result.json").read_text())
                line += compare(folder, results[cell.name])
            except Failed as error:
                line += [f"failed: {error}", "", "", ""]
            rows.append(line)
            print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["command", "model", "mean difference", "largest", "likeliest equal", "greedy equal"]
    text = (
        f"{table(header, rows)}\nDifferences of log probabilities in nats, over the {TOP} likeliest tokens "
    )
    text += f"of {len(IDS) - 1} positions. Measured with {versions(results)}, {args.dtype}.\n"
    if not all(result["own_product"] for result in results.values()):
        text += "This machine has no AVX-512, for which alone vLLM builds its int4 product: a literal one in "
        text += "torch stood in for it. Reading and repacking are vLLM's own.\n"
    if args.no_write:
        print(text)
    else:
        write_section("vllm", text)


if __name__ == "__main__":
    main()
