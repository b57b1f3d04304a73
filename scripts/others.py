"""Reading others' files: checkpoints made by other tools, measured in their own clients and by quantkit.

    python scripts/others.py --clients-python .venv-clients/bin/python \\
        --llmc-python .venv-peers/llmcompressor/bin/python --legacy-python .venv-legacy/bin/python

Each tool compresses the demo model in its own environment with its default options; its own client
measures perplexity on tests/data/heldout.txt in windows of 256 tokens, transformers does with the decoded
weights in float32, then `quantkit eval` does, all with the same windows. `--keep DIR` keeps the
checkpoints, and makes and measures only what is missing. The table goes to docs/clients.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from client_runs import (
    DEMO,
    ROOT,
    Failed,
    load_client,
    quantkit_logged,
    run_script,
    table,
    versions,
    write_section,
)

TEXT = ROOT / "tests/data/heldout.txt"
CONTEXT = 256
SAMPLES, SEQLEN = 16, 256  # the readers are under test here, not the tools


@dataclass(frozen=True)
class Case:
    """One checkpoint of another tool. options: of a job of peers/run.py; dtype: what its client runs in."""

    tool: str
    label: str
    options: dict = field(default_factory=dict)
    loader: str = "transformers"
    dtype: str = "float32"
    quantizes_activations: bool = False


G128 = {"method": "gptq"}
CASES = {
    "gptqmodel-w4": Case("gptqmodel", "GPTQ 4 bit g128", G128, "gptqmodel", "float16"),
    "gptqmodel-w3": Case("gptqmodel", "GPTQ 3 bit g128", G128 | {"bits": 3}, "gptqmodel", "float16"),
    "gptqmodel-w4-desc-act": Case(
        "gptqmodel", "GPTQ 4 bit g128, desc_act", G128 | {"desc_act": True}, "gptqmodel", "float16"
    ),
    "llmcompressor-gptq-sym": Case("llmcompressor", "GPTQ W4A16 g128", G128),
    "llmcompressor-gptq-asym": Case("llmcompressor", "GPTQ W4A16 g128, asymmetric", G128 | {"sym": False}),
    "llmcompressor-awq": Case("llmcompressor", "AWQ W4A16 g128", {"method": "awq", "sym": False}),
    "llmcompressor-w8a8": Case("llmcompressor", "W8A8 int8", {"method": "W8A8"}, quantizes_activations=True),
    "llmcompressor-fp8": Case(
        "llmcompressor", "FP8 dynamic", {"method": "FP8_DYNAMIC"}, quantizes_activations=True
    ),
    "autoawq-g128": Case("autoawq", "AWQ 4 bit g128", {"method": "awq", "sym": False}, "autoawq", "float16"),
    "autoawq-g64": Case(
        "autoawq", "AWQ 4 bit g64", {"method": "awq", "sym": False, "group_size": 64}, "autoawq", "float16"
    ),
    "bitsandbytes-int8": Case("bitsandbytes", "LLM.int8", {"method": "int8"}, quantizes_activations=True),
    "bitsandbytes-nf4": Case("bitsandbytes", "NF4", {"method": "nf4"}),
    "bitsandbytes-nf4-double": Case("bitsandbytes", "NF4, double quantization", {"method": "nf4-double"}),
}


def make(case: Case, python: str, tokens: Path, folder: Path) -> None:
    """The tool's checkpoint, in `folder`. Raises Failed."""
    request = {"tool": case.tool, "model": str(DEMO), "tokens": str(tokens), "out": str(folder)}
    run_script(python, ROOT / "scripts/peers/run.py", request | case.options, folder / "made.json")


def measure(case: Case, name: str, pythons: dict[str, str], ids: list[list[int]], folder: Path) -> dict:
    """Perplexity by the tool's own client, and by transformers with the decoded weights in float32.

    Both are kept in `client.json` beside the checkpoint; what could not be loaded is in there, too.
    """
    kept = folder / "client.json"
    if not kept.exists():
        own = {"name": "own", "folder": str(folder), "loader": case.loader, "dtype": case.dtype}
        decoded = own | {"name": "decoded", "loader": "transformers", "dtype": "float32", "dequantize": True}
        results = {}
        for python, job in ((pythons[case.tool], own), (pythons["transformers"], decoded)):
            results |= load_client(python, [job], ids, "nll", folder / "client" / job["name"])
        for result in results.values():
            if result["error"] is None:
                result["ppl"] = math.exp(result["nll"])
        kept.write_text(json.dumps({"name": name, "dtype": case.dtype} | results, indent=2) + "\n")
    return json.loads(kept.read_text())


def own_perplexity(folder: Path) -> float:
    """What `quantkit eval` says of the folder. Raises Failed."""
    arguments = ["eval", str(folder), "--text", str(TEXT), "--ctx", str(CONTEXT), "--json", "-q"]
    log = folder / "quantkit-eval.log"
    quantkit_logged(arguments, log)
    printed = log.read_text()
    return json.loads(printed[printed.index("{") :])["models"][0]["metrics"]["ppl"]["value"]


def write_inputs(folder: Path) -> tuple[Path, list[list[int]]]:
    """The calibration tokens every tool is given, and the windows every client is measured on."""
    from quantkit.evaluation import windows as windows_of
    from quantkit.models.files.open import open_checkpoint
    from quantkit.options import CalibrationOptions
    from quantkit.text import calibration

    base = open_checkpoint(str(DEMO))
    tokens = folder / "tokens.json"
    rows = calibration.load(base, CalibrationOptions(samples=SAMPLES, seqlen=SEQLEN)).tokens.tolist()
    tokens.write_text(json.dumps(rows))
    return tokens, windows_of.load(base, TEXT, CONTEXT, None, None).ids.tolist()


def row(name: str, pythons: dict[str, str], inputs: tuple, root: Path) -> tuple[list[str], dict]:
    """One line of the table, and the client's results; whatever fails is said in the line."""
    tokens, ids = inputs
    case, folder = CASES[name], root / name
    note = ", activations too" if case.quantizes_activations else ""
    line = [case.tool, case.label + note]
    try:
        if not (folder / "config.json").exists():
            make(case, pythons[case.tool], tokens, folder)
        client = measure(case, name, pythons, ids, folder)
    except Failed as error:
        return [*line, f"failed: {error}", "–", "–"], {}
    theirs, decoded = (
        f"{part['ppl']:.3f}" if part["error"] is None else f"failed: {part['error']}"
        for part in (client["own"], client["decoded"])
    )
    try:
        ours = f"{own_perplexity(folder):.3f}"
    except Failed as error:
        ours = str(error)
    return [*line, f"{theirs} ({case.dtype})", decoded, ours], client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients-python", default=".venv-clients/bin/python")
    parser.add_argument("--legacy-python", default=".venv-legacy/bin/python")
    parser.add_argument("--llmc-python", default=".venv-peers/llmcompressor/bin/python")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--no-write", action="store_true", help="leave docs/clients.md alone")
    args = parser.parse_args()
    clients = args.clients_python
    pythons = {"transformers": clients, "gptqmodel": clients, "bitsandbytes": clients}
    pythons |= {"llmcompressor": args.llmc_python, "autoawq": args.legacy_python}
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        inputs = write_inputs(root)
        for name in args.only:
            line, client = row(name, pythons, inputs, root)
            rows.append(line)
            found |= {f"{name} {part}": client[part] for part in ("own", "decoded") if part in client}
            print(" | ".join(line), file=sys.stderr, flush=True)
    header = ["tool", "checkpoint", "its own client", "transformers, decoded, float32", "`quantkit eval`"]
    text = f"Perplexity on {TEXT.name}, windows of {CONTEXT} tokens.\n\n{table(header, rows)}"
    text += f"\nMeasured with {versions(found)}.\n"
    if args.no_write:
        print(text)
    else:
        write_section("others", text)


if __name__ == "__main__":
    main()
