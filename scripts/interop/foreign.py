"""Checkpoints of other tools: perplexity in their own clients, in transformers (decoded) and in quantkit."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from common import DEMO, HELDOUT, ROOT, Failed, quantkit_logged, run_script, table, versions
from peers.jobs import python_of, run_job, write_tokens

WINDOW = 256
SAMPLES, SEQLEN = 16, 256  # the readers are under test here, not the tools
HEADER = ["tool", "checkpoint", "its own client", "transformers, decoded, float32", "`quantkit eval`"]


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another tool. options: of a job of peers/run.py; dtype: that its client computes in."""

    tool: str
    label: str
    options: dict = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def loader(self) -> str:
        return "gptqmodel" if self.tool == "gptqmodel" else "transformers"


G128 = {"method": "gptq"}
FOREIGN = {
    "gptqmodel-w4": Foreign("gptqmodel", "GPTQ 4 bit g128", G128, "float16"),
    "gptqmodel-w3": Foreign("gptqmodel", "GPTQ 3 bit g128", G128 | {"bits": 3}, "float16"),
    "gptqmodel-w4-desc-act": Foreign(
        "gptqmodel", "GPTQ 4 bit g128, desc_act", G128 | {"desc_act": True}, "float16"
    ),
    "llmcompressor-gptq-sym": Foreign("llmcompressor", "GPTQ W4A16 g128", G128),
    "llmcompressor-gptq-asym": Foreign("llmcompressor", "GPTQ W4A16 g128, asymmetric", G128 | {"sym": False}),
    "llmcompressor-awq": Foreign("llmcompressor", "AWQ W4A16 g128", {"method": "awq", "sym": False}),
    "llmcompressor-w8a8": Foreign("llmcompressor", "W8A8 int8, activations too", {"method": "W8A8"}),
    "llmcompressor-fp8": Foreign("llmcompressor", "FP8 dynamic, activations too", {"method": "FP8_DYNAMIC"}),
    "bitsandbytes-int8": Foreign("bitsandbytes", "LLM.int8, activations too", {"method": "int8"}),
    "bitsandbytes-nf4": Foreign("bitsandbytes", "NF4", {"method": "nf4"}),
    "bitsandbytes-nf4-double": Foreign("bitsandbytes", "NF4, double quantization", {"method": "nf4-double"}),
}


def in_client(python: str, request: dict, path: Path) -> dict:
    """Return what load_client.py reports of a checkpoint, with its perplexity. Raises Failed."""
    result = path.with_suffix(".result.json")
    if not result.exists():
        run_script(python, ROOT / "scripts/interop/load_client.py", request, path)
    report = json.loads(result.read_text())
    return report | ({} if report["error"] else {"ppl": math.exp(report["nll"])})


def in_clients(case: Foreign, python: str | None, ids: list[list[int]], folder: Path) -> dict[str, dict]:
    """Return results of the tool's own client, and of transformers with the decoded weights in float32."""
    own = {"ids": ids, "folder": str(folder), "loader": case.loader, "dtype": case.dtype}
    decoded = own | {"loader": "transformers", "dtype": "float32", "dequantize": True}
    client = str(python or python_of("transformers"))
    own_python = str(python_of(case.tool)) if case.tool == "llmcompressor" else client
    return {
        "own": in_client(own_python, own, folder / "own.json"),
        "decoded": in_client(client, decoded, folder / "decoded.json"),
    }


def own_perplexity(folder: Path) -> float:
    """Return the perplexity by `quantkit eval`. Raises Failed."""
    log = folder / "quantkit-eval.log"
    quantkit_logged(["eval", str(folder), "--text", str(HELDOUT), "--ctx", str(WINDOW), "--json", "-q"], log)
    printed = log.read_text()
    return json.loads(printed[printed.index("{") :])["models"][0]["metrics"]["ppl"]["value"]


def row_of(
    name: str, python: str | None, tokens: Path, ids: list[list[int]], root: Path
) -> tuple[list[str], dict]:
    """Return a row of the table and the results of both clients; the row names what fails."""
    case, folder = FOREIGN[name], root / name
    row = [case.tool, case.label]
    try:
        run_job(case.tool, DEMO, tokens, folder, **case.options)
        client = in_clients(case, python, ids, folder)
    except Failed as error:
        return [*row, f"failed: {error}", "–", "–"], {}
    theirs, decoded = (
        f"failed: {result['error']}" if result["error"] else f"{result['ppl']:.3f}"
        for result in client.values()
    )
    try:
        ours = f"{own_perplexity(folder):.3f}"
    except Failed as error:
        ours = str(error)
    return [*row, f"{theirs} ({case.dtype})", decoded, ours], client


def section(args: argparse.Namespace, root: Path) -> str:
    """Return the table of other tools' checkpoints and its notes."""
    from quantkit.evaluation import windows
    from quantkit.models.files.open import open_checkpoint

    tokens = root / "tokens.json"
    write_tokens(DEMO, tokens, SAMPLES, SEQLEN)
    ids = windows.load(open_checkpoint(str(DEMO)), HELDOUT, WINDOW, None, None).ids.tolist()
    rows, results = [], {}
    for name in FOREIGN:
        if args.match in name:
            row, client = row_of(name, args.python, tokens, ids, root)
            rows.append(row)
            results |= {f"{name} {part}": result for part, result in client.items()}
            print(" | ".join(row), file=sys.stderr, flush=True)
    text = f"Perplexity on {HELDOUT.name}, windows of {WINDOW} tokens.\n\n{table(HEADER, rows)}"
    return text + f"\nMeasured with {versions(results)}.\n"
