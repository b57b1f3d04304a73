"""Loss of what `quantkit auto` finds, against uniform presets of the same bytes and llama-quantize."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import ROOT, quantkit, table
from loss.jobs import divergences, evaluated, show

PRESETS = {  # engine and further flags -> presets whose bits are the budgets
    ("transformers",): ("3 bit g128", "3 bit g64", "3 bit g32"),
    ("llama.cpp",): ("Q2_K", "Q3_K_M", "Q4_K_M"),
    ("any", "--no-sym"): ("3 bit g128",),
}
UNIFORM, IMATRIX = 0.85, 0.5  # at most, of the uniform preset's divergence and of the imatrix file's
HEAD = ["model", "engine", "size of", "bits/weight", "uniform: predicted", "uniform: measured"]
HEAD += ["searched: predicted", "searched: measured", "searched / uniform", "imatrix: measured"]
HEAD += ["searched / imatrix"]


def searched(
    model: str, folder: Path, engine: str, flags: list[str], preset: str, args: argparse.Namespace
) -> dict:
    """Return bits and divergences of a search, the uniform preset and llama-quantize's file (or None)."""
    output = folder / f"out{'.gguf' if engine == 'llama.cpp' else ''}"
    command = ["auto", model, "--engine", engine, *flags, "-o", output, "--json", "--overwrite"]
    command += ["--samples", args.samples, "--search-tokens", args.search_tokens]
    command += ["--text", args.text, "--ctx", args.ctx, "--limit", args.limit]
    command += ["--sensitivities", folder / f"{Path(model).name}-{engine}.json"]
    bits = json.loads(quantkit(*command, "--bpw", "4", "--dry-run"))["presets"][preset]
    record = json.loads(quantkit(*command, "--bpw", repr(bits * (1 + 1e-9))))
    row = {"bits": bits, "uniform": record["uniform"], "searched": record["searched"], "imatrix": None}
    if engine == "llama.cpp":
        file = folder / f"{preset}.gguf"
        options = ["-t", preset, "--solver", "rtn", "-o", file, "--samples", args.samples, "--overwrite"]
        quantkit("gguf", model, *options)
        (row["imatrix"],) = divergences(evaluated(model, [file], args))
    return row


def cells(row: dict) -> list[str]:
    """Return a row's cells after its names; empty where there is no imatrix file."""
    uniform, found, imatrix = row["uniform"], row["searched"], row["imatrix"]
    figures = [side[key] for side in (uniform, found) for key in ("predicted_kld", "kld")]
    ratios = [f"{found['kld'] / uniform['kld']:.2f}"]
    ratios += [f"{imatrix:.5f}", f"{found['kld'] / imatrix:.2f}"] if imatrix else ["", ""]
    return [f"{row['bits']:.3f}", *(f"{figure:.5f}" for figure in figures), *ratios]


def run(args: argparse.Namespace, folder: Path) -> list[str]:
    rows, missed, store = [], [], folder / "rows.json"
    protocol = repr([args.text.name, args.ctx, args.limit, args.samples, args.search_tokens])
    known = json.loads(store.read_text()) if store.exists() else {}
    for model in args.models:
        for (engine, *flags), presets in PRESETS.items():
            for preset in presets if args.only in ("", engine) else ():
                names = [Path(model).name, " ".join([engine, *flags]), preset]
                where = " ".join(names)
                key = f"{where} {protocol}"
                row = known[key] = known.get(key) or searched(model, folder, engine, flags, preset, args)
                store.write_text(json.dumps(known, indent=1))
                rows.append([*names, *cells(row)])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
                against, name, limit = row["uniform"]["kld"], "uniform", UNIFORM
                if row["imatrix"]:
                    against, name, limit = row["imatrix"], "imatrix", IMATRIX
                if (ratio := row["searched"]["kld"] / against) > limit:
                    missed.append(f"{where}: {ratio:.2f} of {name}")
    note = f"\n{args.text.name}, context {args.ctx}, first {args.limit} tokens; "
    note += f"{args.samples} sequences of calibration text, {args.search_tokens} search tokens.\n"
    show(args, "auto", table(HEAD, rows, left=3) + note, ROOT / "docs/auto.md")
    return missed
