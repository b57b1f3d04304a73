"""Regenerate the tables of docs/specdec.md: what drafts of the demo model are worth, and to whom.

    python scripts/results_specdec.py [MODEL] [--prompts 8] [--tokens 64] [--repeats 3] [--k 1,2,4,8]
                                      [--work FOLDER]

MODEL (the bundled demo model unless given) is copied in nf4, by gptq at 4, 3 and 2 bit; each copy drafts for
it, and so does prompt-lookup, greedy and sampled at temperature 1. The first table is what was measured here.
The second needs no clock: α as counted, c from the bytes that a step reads where weights are read packed, and
what both give by theory. Fails if text that was drafted is not the target's own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from client_runs import ROOT, quantkit

COPIES = {
    "nf4": ["nf4"],
    "gptq, 4 bit": ["gptq", "--bits", "4", "--group-size", "32"],
    "gptq, 3 bit": ["gptq", "--bits", "3", "--group-size", "32"],
    "gptq, 2 bit": ["gptq", "--bits", "2", "--group-size", "32"],
}


def make(model: str, folder: Path) -> dict[str, str]:
    """The copies, by name."""
    made = {}
    for name, asked in COPIES.items():
        place = folder / name.replace(", ", "-").replace(" ", "")
        if not place.exists():
            quantkit(*asked, model, "-o", str(place))
        made[name] = str(place)
    return made


def measured(found: dict[float, list[dict]], names: list[str]) -> str:
    lines = ["| draft | text | α | tokens a step, k = 4 | c | measured, best k | by theory |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for temperature, drafts in found.items():
        for name, draft in zip(names, drafts, strict=True):
            four = next(row for row in draft["swept"] if row["k"] == 4)
            best, theory = draft["measured"], draft["in_theory"]
            text = f"temperature {temperature:g}" if temperature else "greedy"
            told = f"{theory['speedup']:.2f}x, {theory['k']}" if theory["k"] else "do not draft"
            lines.append(
                f"| {name} | {text} | {draft['alpha']:.2f} | {four['tokens_per_step']:.2f} | "
                f"{draft['cost']:.2f} | {best['speedup']:.2f}x, {best['k']} | {told} |"
            )
    return "\n".join(lines)


def by_count(found: dict[float, list[dict]], names: list[str]) -> str:
    lines = ["| draft | c by bytes | greedy | sampled |", "| --- | ---: | ---: | ---: |"]
    for place, name in enumerate(names):
        rows = [drafts[place] for drafts in found.values()]
        if rows[0]["draft_memory"] is None:
            continue
        cells = [f"{row['by_bytes']['speedup']:.2f}x, k = {row['by_bytes']['k']}" for row in rows]
        lines.append(f"| {name} | {rows[0]['cost_by_bytes']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "tests/data/demo-llama-6m"))
    for flag, value in (("prompts", 8), ("tokens", 64), ("repeats", 3)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--k", default="1,2,4,8")
    parser.add_argument("--work", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        copies = make(asked.model, asked.work or Path(temporary))
        sizes = [f"--{flag}={getattr(asked, flag)}" for flag in ("prompts", "tokens", "repeats", "k")]
        found = {}
        for temperature in (0.0, 1.0):
            command = ["specdec", asked.model, *copies.values(), "prompt-lookup", *sizes, "--json"]
            found[temperature] = json.loads(quantkit(*command, f"--temperature={temperature}"))["drafts"]
    names = [*copies, "prompt-lookup"]
    print(measured(found, names), by_count(found, names), sep="\n\n")
    for temperature, drafts in found.items():
        for name, draft in zip(names, drafts, strict=True):
            draft["proof"].pop("partings", None)
            print(f"\n{name} at {temperature:g}: {json.dumps(draft['proof'])}")


if __name__ == "__main__":
    main()
