"""quantkit's checkpoints in the clients of old: AutoGPTQ and AutoAWQ, compared with quantkit's own decode.

    scripts/clients-setup.sh legacy && python scripts/clients_legacy.py [--python .venv-legacy/bin/python]

Writes the section `legacy` of docs/clients.md. AutoGPTQ computes in float32 and reads every bit of the
layout, so its logits are expected to be equal but for the order of summation; AutoAWQ computes in float16.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from client_cells import IDS, Cell, make, own_logits
from client_runs import Failed, load_client, table, versions, write_section

CLIENTS = {"gptq": ("autogptq", "float32"), "awq": ("autoawq", "float16")}
CELLS = [
    Cell("gptq"),
    Cell("gptq --bits 2 --group-size 64"),
    Cell("gptq --bits 3"),
    Cell("gptq --bits 8"),
    Cell("gptq --no-sym"),
    Cell("gptq --no-sym --bits 3"),
    Cell("gptq --act-order full"),
    Cell("gptq --act-order full --no-sym --group-size 32"),
    Cell("gptq --group-size -1"),
    Cell("gptq --group-size 32", "qwen2"),
    Cell("gptq", "llama-bias"),
    Cell("gptq --group-size 32", "opt"),
    Cell("awq"),
    Cell("awq --group-size 32"),
    Cell("awq --no-zero-point"),
    Cell("awq --no-zero-point --group-size 32"),
    Cell("awq", "qwen2"),
    Cell("awq --group-size 32", "opt"),
]


def read(cells: list[tuple[Cell, Path]], client: str, python: str, root: Path) -> dict:
    """What one client says of its checkpoints, all in one process; `logits` where it could load them."""
    from safetensors.torch import load_file

    loader, dtype = CLIENTS[client]
    jobs = [
        {"name": cell.name, "folder": str(folder), "loader": loader, "dtype": dtype} for cell, folder in cells
    ]
    folder = root / "legacy" / client
    results = load_client(python, jobs, [IDS], "logits", folder)
    if (folder / "logits.safetensors").exists():
        for name, logits in load_file(folder / "logits.safetensors").items():
            results[name]["logits"] = logits
    return results


def compare(folder: Path, result: dict) -> list[str]:
    """The client's logits against quantkit's decode, as table cells."""
    if result["error"] is not None:
        return [f"failed: {result['error']}", "", ""]
    expected, found = own_logits(folder, IDS), result["logits"]
    relative = ((found - expected).norm() / expected.norm()).item()
    largest = (found - expected).abs().max().item()
    equal = (found.argmax(-1) == expected.argmax(-1)).sum().item()
    return [f"{relative:.1e}", f"{largest:.1e}", f"{equal}/{len(IDS)}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=".venv-legacy/bin/python")
    parser.add_argument("--keep", type=Path, help="keep checkpoints here, and use those that are there")
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument("--no-write", action="store_true", help="leave docs/clients.md alone")
    args = parser.parse_args()
    lines: dict[str, list[str]] = {}
    made: dict[str, list[tuple[Cell, Path]]] = {client: [] for client in CLIENTS}
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).absolute()
        cells = [cell for cell in CELLS if args.match in cell.name]
        for cell in cells:
            client = cell.command.split()[0]
            lines[cell.name] = [CLIENTS[client][0], f"`{cell.command}`", cell.source]
            try:
                made[client].append((cell, make(cell, root)))
            except Failed as error:
                lines[cell.name] += [f"not made: {error}", "", ""]
        for client, checkpoints in made.items():
            if checkpoints:
                found = read(checkpoints, client, args.python, root)
                for cell, folder in checkpoints:
                    lines[cell.name] += compare(folder, found[cell.name])
                results |= found
    for line in lines.values():
        print(" | ".join(line), file=sys.stderr)
    header = ["client", "command", "model", "relative difference", "largest", "likeliest equal"]
    text = f"{table(header, list(lines.values()))}\nDifferences of logits over {len(IDS)} tokens; AutoGPTQ "
    text += f"in float32, AutoAWQ in float16. Measured with {versions(results)}.\n"
    text += "AutoGPTQ ties embeddings to a head that no file holds: the script puts the stored ones back.\n"
    if args.no_write:
        print(text)
    else:
        write_section("legacy", text)


if __name__ == "__main__":
    main()
