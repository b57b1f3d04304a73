"""Regenerate the table of docs/auto.md: what a search finds, against uniform presets of the same bytes.

    python scripts/results_auto.py [MODEL ...] [--text TEXT] [--ctx 256] [--limit N] [--samples 128]
                                   [--only ENGINE] [--best] [--keep FOLDER] [--write]

For every engine and every preset of PRESETS, `quantkit auto` is given the bits of that preset; the best
uniform preset of that size is what it compares with. GGUF files are compared with llama-quantize's, too: the
same type by its own encoder with an importance matrix (`--solver rtn`, byte for byte). With `--best`, where
the search won, its recipe is made once more with `--solver yaqa --target original`, the best that quantkit
knows at the same bytes. All are measured on TEXT, on which nothing is chosen. Says which targets are missed.

`--keep FOLDER` keeps tables of sensitivities and finished rows, from which an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from client_runs import ROOT, quantkit, write_section

PRESETS = {  # engine and further flags -> presets whose bits are the budgets
    ("transformers",): ("3 bit g128", "3 bit g64", "3 bit g32"),
    ("llama.cpp",): ("Q2_K", "Q3_K_M", "Q4_K_M"),
    ("any", "--no-sym"): ("3 bit g128",),
}
BEST = ["--set", "quant.solver=yaqa", "--set", "quant.target=original"]
UNIFORM, IMATRIX = 0.7, 0.5  # of the uniform preset's divergence, and of the imatrix file's, at most
HEAD = [
    "| model | engine | size of | bits/weight | uniform: predicted | measured | searched: predicted "
    "| measured | of uniform | yaqa | of uniform | imatrix | searched: of it | yaqa: of it |",
    "| --- | --- | --- | " + " | ".join(["---:"] * 11) + " |",
]


class Measured:
    """Rows of the table for one model."""

    def __init__(self, model: str, folder: Path, args: argparse.Namespace):
        self.model, self.folder, self.name = model, folder, Path(model).name
        self.on = ["--text", str(args.text), "--ctx", str(args.ctx), "--limit", str(args.limit)]
        self.search = ["--samples", str(args.samples), "--search-tokens", str(args.search_tokens)]
        self.samples = args.samples

    def divergence(self, place: str) -> float:
        """KL divergence of an output."""
        record = json.loads(quantkit("eval", self.model, place, *self.on, "--json"))
        return record["models"][1]["metrics"]["kld"]["mean"]

    def imatrix(self, name: str) -> float:
        """Of llama-quantize's file of this type."""
        place = str(self.folder / f"{name}.gguf")
        made = ["-t", name, "--solver", "rtn", "-o", place, "--samples", str(self.samples), "--overwrite"]
        quantkit("gguf", self.model, *made)
        return self.divergence(place)

    def row(self, engine: str, more: list[str], preset: str) -> dict:
        """Bits and divergences; None for what does not apply."""
        output = str(self.folder / "out") + (".gguf" if engine == "llama.cpp" else "")
        common = ["auto", self.model, "--engine", engine, *more, "-o", output, *self.search, *self.on]
        table = self.folder / f"{self.name}-{engine}.json"
        common += ["--sensitivities", str(table), "--json", "--overwrite"]
        bits = json.loads(quantkit(*common, "--bpw", "4", "--dry-run"))["presets"][preset]
        record = json.loads(quantkit(*common, "--bpw", repr(bits * (1 + 1e-9))))
        found = {"bits": bits, "uniform": record["uniform"], "searched": record["searched"]}
        found |= {"recipe": record["recipe"] if record["kept"] == "searched" else None, "best": None}
        found["imatrix"] = self.imatrix(preset) if engine == "llama.cpp" else None
        return found

    def with_best(self, row: dict) -> dict:
        """A row with the searched recipe by the stronger solver, where the search won."""
        if row["recipe"] is None or row["best"] is not None:
            return row
        output = str(self.folder / "best") + (".gguf" if row["imatrix"] else "")
        recipe = self.folder / "best.yaml"
        recipe.write_text(row["recipe"])
        quantkit("run", str(recipe), *BEST, "-o", output, "--overwrite")
        return row | {"best": self.divergence(output)}


def line(name: str, engine: str, preset: str, row: dict) -> str:
    """Of the table."""
    uniform, searched, best, imatrix = row["uniform"], row["searched"], row["best"], row["imatrix"]

    def of(value: float | None, other: float | None) -> str:
        return "" if value is None or other is None else f"{value / other:.2f}"

    cells = [name, engine, preset, f"{row['bits']:.3f}"]
    cells += [f"{one[key]:.5f}" for one in (uniform, searched) for key in ("predicted_kld", "kld")]
    cells += [of(searched["kld"], uniform["kld"]), f"{best:.5f}" if best else "", of(best, uniform["kld"])]
    cells += [f"{imatrix:.5f}" if imatrix else "", of(searched["kld"], imatrix), of(best, imatrix)]
    return f"| {' | '.join(cells)} |"


def missed(where: str, row: dict) -> list[str]:
    """Targets that a row misses."""
    uniform, imatrix = row["uniform"]["kld"], row["imatrix"]
    against, name, limit = (imatrix, "imatrix", IMATRIX) if imatrix else (uniform, "uniform", UNIFORM)
    ratio = row["searched"]["kld"] / against
    return [f"{where}: {ratio:.2f} of {name}"] if ratio > limit else []


def without_empty(lines: list[str]) -> list[str]:
    """The table without columns that have nothing in any row."""
    rows = [[cell.strip() for cell in one.strip("|").split("|")] for one in lines]
    filled = [k for k in range(len(rows[0])) if any(row[k] for row in rows[2:])]
    return [f"| {' | '.join(row[k] for k in filled)} |" for row in rows]


def kept(path: Path) -> dict:
    """Rows of an earlier run."""
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(ROOT / "tests/data/demo-llama-6m")])
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/heldout.txt")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--limit", type=int, default=10240)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--search-tokens", type=int, default=4096)
    parser.add_argument("--only", help="one engine alone")
    parser.add_argument("--best", action="store_true", help="the searched recipes by yaqa, too")
    parser.add_argument("--keep", type=Path, help="folder for tables and finished rows")
    parser.add_argument("--write", action="store_true", help="put the table where it belongs")
    args = parser.parse_args()
    lines, short = [*HEAD], []
    asked = repr([args.text.name, args.ctx, args.limit, args.samples, args.search_tokens])
    with tempfile.TemporaryDirectory() if args.keep is None else nullcontext(args.keep) as name:
        folder = Path(name)
        folder.mkdir(exist_ok=True)
        for model in args.models:
            measured = Measured(model, folder, args)
            for (engine, *more), presets in PRESETS.items():
                for preset in presets if args.only in (None, engine) else ():
                    where = f"{measured.name} {' '.join([engine, *more])} {preset}"
                    rows = kept(folder / "rows.json")
                    key = f"{where} {asked}"
                    if key not in rows:
                        rows[key] = measured.row(engine, more, preset)
                    if args.best:
                        rows[key] = measured.with_best(rows[key])
                    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
                    lines.append(line(measured.name, " ".join([engine, *more]), preset, rows[key]))
                    short += missed(where, rows[key])
                    print(lines[-1], flush=True)
    lines = [*without_empty(lines), f"\n{args.text.name}, context {args.ctx}, first {args.limit} tokens; "]
    lines[-1] += f"{args.samples} sequences of calibration text, {args.search_tokens} search tokens."
    if args.write:
        write_section("auto", "\n".join(lines) + "\n", ROOT / "docs/auto.md")
    if short:
        sys.exit(f"targets missed: {', '.join(short)}")


if __name__ == "__main__":
    main()
