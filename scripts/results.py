"""Regenerate the tables of loss in the pages, each from a protocol of its own.

    python scripts/results.py PART [MODEL ...] [--text TEXT] [--ctx 256] [--limit N] [--write]

methods: every method at default options; then the same for a twin with outlier channels.
gguf: error feedback against llama-quantize in the same bytes, as decoded and as llama.cpp computes, whose
    kernels round activations; `--i-quants`: the types of 2 and 3 bits.
experts: a mixture by `--experts` choice, by ever fewer calibration tokens, and as GGUF files.
auto: what `quantkit auto` finds, against uniform presets of the same bytes and against llama-quantize;
    `--best`: the searched recipes once more by the strongest solver.
distill: compressed students before and after 128 sequences of their teacher.
specdec: drafts of the model, measured and by theory.
cloze: no table, but quantkit/evaluation/tasks/cloze.jsonl: passages whose last word is to be guessed.

MODEL is the bundled demo model unless given, TEXT is text on which nothing was trained or chosen. `--keep
FOLDER` keeps what is made, and an interrupted run goes on from there. Exit code 1 where a table does not show
what is claimed of it beside it here. gguf and experts need the xllamacpp package.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import common
import torch
from common import DEMO, ROOT, outlier_twin, quantkit, table, write_section

from quantkit.evaluation import self_text
from quantkit.evaluation import windows as windows_of
from quantkit.layouts import Statistic
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize import job, loop, methods
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.progress import Progress

Job = tuple[str, dict]  # method, options
RUN, CALIBRATION = RunOptions(), CalibrationOptions()
MEASUREMENTS = ROOT / "docs/measurements"
GPTQ = {
    f"{solver} {bits} bit": ("gptq", {"bits": bits, "solver": solver})
    for bits in (8, 4, 3, 2)
    for solver in ("gptq", "rtn")
}
BEST = {  # what takes more time
    f"{bits} bit, yaqa": ("gptq", {"bits": bits, "solver": "yaqa"}) for bits in (4, 3, 2)
}
OWN = {  # calibrated on text that the model writes itself
    f"{name}, own text": made
    for name, made in [*((f"gptq {bits} bit", GPTQ[f"gptq {bits} bit"]) for bits in (4, 3, 2)), *BEST.items()]
}
OTHERS = {
    "int8": ("int8", {}),
    "nf4": ("nf4", {}),
    "nf4 gptq": ("nf4", {"solver": "gptq"}),
    "awq 4 bit": ("awq", {}),
    "awq gptq 4 bit": ("awq", {"solver": "gptq"}),
}
TYPES = {name: ("gguf", {"type": (name,)}) for name in ("Q2_K", "Q3_K_M", "Q4_K_M")}


# What all parts share


def show(args: argparse.Namespace, marker: str, text: str, document: Path) -> None:
    """Print a table, or put it between its markers."""
    write_section(marker, text, document) if args.write else print(text, flush=True)


def quantize(
    model: str,
    output: Path,
    name: str,
    made: Job,
    run: RunOptions = RUN,
    calibration: CalibrationOptions = CALIBRATION,
) -> str:
    """One job in this process, unless its output is there; returns the folder or file written."""
    method, options = made
    place = output / (re.sub(r"\W+", "-", name) + (".gguf" if method == "gguf" else ""))
    if not place.exists():
        chosen = methods.load(method).Options(**options)
        request = job.Request(model, method, chosen, calibration, run, place)
        loop.run(job.prepare(request, Progress()), Progress())
        print(f"{name} done", file=sys.stderr)
    return str(place)


def evaluated(model: str, places: Iterable[object], args: argparse.Namespace) -> dict:
    """The record of the model and of what was made of it, on the text that was asked for."""
    return common.evaluated(model, places, args.text, args.ctx, args.limit)


def divergences(record: dict) -> list[float]:
    """KL divergence of each model but the first."""
    return [model["metrics"]["kld"]["mean"] for model in record["models"][1:]]


def every_metric(record: dict, names: list[str]) -> str:
    """Markdown of an evaluation record; names label its models in order."""
    rows = []
    for name, model in zip(names, record["models"], strict=True):
        metrics, size = model["metrics"], model["size"]
        rows.append([name, f"{size['weight_bytes'] / 1e6:.2f} MB", f"{size['bits_per_weight']:.2f}"])
        rows[-1].append(f"{metrics['ppl']['value']:.2f} ± {metrics['ppl']['stderr']:.2f}")
        rows[-1].append(f"{metrics['nll']['value']:.4f} ± {metrics['nll']['stderr']:.4f}")
        rows[-1].append(f"{metrics['kld']['mean']:.5f}" if metrics["kld"] else "–")
    data = record["data"]
    return (
        table(["", "size", "model bits", "perplexity", "nll", "KL divergence"], rows, left=1)
        + f"\n{data['text']} (sha256 {data['sha256'][:12]}): {data['tokens']} tokens, context {data['ctx']}, "
        f"stride {data['stride']}, {data['dtype']}.\n"
    )


# methods

TWIN = {
    "int8": ("int8", {}),
    "int8, threshold 0": ("int8", {"threshold": 0.0}),
    "rtn 4 bit": GPTQ["rtn 4 bit"],
    "gptq 4 bit": GPTQ["gptq 4 bit"],
    "awq 4 bit": OTHERS["awq 4 bit"],
    "awq gptq 4 bit": OTHERS["awq gptq 4 bit"],
    **{name: made for name, made in (BEST | OWN).items() if name.startswith("4 bit")},
}
# (better, worse, factor): the KL divergence of the first is at most factor times that of the second
CLAIMS = {
    "every": [
        *((f"gptq {bits} bit", f"rtn {bits} bit", 1.0) for bits in (8, 4, 3, 2)),
        *((f"{bits} bit, yaqa", f"gptq {bits} bit", 0.9) for bits in (4, 3, 2)),
        *((f"{name}, own text", name, 0.9) for name in BEST),
        ("nf4 gptq", "nf4", 0.6),
        ("awq 4 bit", "rtn 4 bit", 1.0),
        ("awq gptq 4 bit", "awq 4 bit", 1.0),
    ],
    "outliers": [("int8", "int8, threshold 0", 0.2), ("awq 4 bit", "rtn 4 bit", 1.0)],
}


def own_text(model: str, folder: Path, settings: self_text.Settings | None = None) -> CalibrationOptions:
    """As many sequences as of the shipped text, written by the model the first time that it is asked."""
    settings = settings or self_text.Settings()
    output = folder / f"own-{settings.samples}.jsonl"
    if not output.exists():
        self_text.write(open_checkpoint(model), settings, output, torch.float32, choose_device("auto"))
    return CalibrationOptions(str(output), samples=settings.samples, seqlen=settings.seqlen)


def own_table(divergence: dict[str, float]) -> str:
    """Markdown: what the text is worth, by itself."""
    rows = []
    for name in OWN:
        shipped = name.removesuffix(", own text")
        before, after = divergence[shipped], divergence[name]
        rows.append([shipped, f"{before:.5f}", f"{after:.5f}", f"{after / before - 1:+.0%}"])
    return table(["", "KL: shipped text", "KL: own text", "change"], rows, left=1)


def by_method(args: argparse.Namespace, folder: Path) -> list[str]:
    missed = []
    twin = outlier_twin(Path(args.models[0]), folder / "twin")
    for marker, model, jobs in (
        ("every", args.models[0], GPTQ | OTHERS | BEST | OWN),
        ("outliers", str(twin), TWIN),
    ):
        place, made = folder / marker, {}
        place.mkdir(exist_ok=True)
        for name, one in jobs.items():
            text = own_text(model, place) if name in OWN else CALIBRATION
            made[name] = quantize(model, place, name, one, calibration=text)
        record = evaluated(model, made.values(), args)
        text, found = (
            every_metric(record, ["original", *jobs]),
            dict(zip(made, divergences(record), strict=True)),
        )
        show(args, marker, text, MEASUREMENTS / "quality.md")
        if args.write and marker == "every":
            write_section("own", own_table(found), ROOT / "docs/sample.md")
        for better, worse, factor in CLAIMS[marker]:
            if not found[better] <= factor * found[worse]:
                missed.append(f"{better} is above {factor:g} of {worse}")
    return missed


# gguf: type -> KL divergence with error feedback, at most so many times that with the imatrix encoder

LIMITS = {
    "Q2_K": 0.6,
    "Q3_K_M": 0.6,
    "Q4_0": 1.0,
    "IQ4_NL": 1.0,
    "IQ4_XS": 1.0,
    "Q4_K_M": 0.6,
    "Q5_K_M": 0.6,
    "Q6_K": 1.0,
    "Q8_0": 1.0,
}
CODE_BOOKS = {"IQ2_XXS": 0.7} | dict.fromkeys(
    ("IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M"), 0.6
)  # the i-quants of 2 and 3 bits, which take longer
SOLVERS = ("rtn", "gptq")


def computed(model: str, files: list[Path], args: argparse.Namespace) -> dict[Path, float]:
    """KL divergence of every file from the original as llama.cpp computes it, over the same tokens."""
    sys.path.insert(0, str(ROOT / "tests"))
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    windows = windows_of.load(open_checkpoint(model), args.text, args.ctx, None, args.limit)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [original(ids[None]).logits[0].log_softmax(-1) for ids in windows.ids]
    found = {}
    for path in files:
        parts = []
        with Llama(path, ctx=args.ctx) as llama:
            for ids, first, wanted in zip(windows.ids, windows.first, expected, strict=True):
                log_probs = torch.from_numpy(llama.logits(ids.tolist())).log_softmax(-1)
                wanted, log_probs = wanted[first:-1], log_probs[first:-1]
                parts.append((wanted.exp() * (wanted - log_probs)).sum(-1))
        found[path] = torch.cat(parts).mean().item()
    return found


def gguf_rows(
    model: str, folder: Path, limits: dict[str, float], args: argparse.Namespace
) -> tuple[list[list[str]], float, list[str]]:
    """A row for each type, the divergence of llama.cpp's F16 file, and the types that miss their limit."""
    types = [flag for name in limits for flag in ("-t", name)]
    for solver in SOLVERS:
        quantkit("gguf", model, *types, "--solver", solver, "-o", folder / solver, "--overwrite")
    floor = folder / "F16.gguf"
    quantkit("gguf", model, "-t", "F16", "-o", floor, "--overwrite")
    stem = Path(model).name
    pairs = {name: [folder / solver / f"{stem}-{name}.gguf" for solver in SOLVERS] for name in limits}
    files = [file for pair in pairs.values() for file in pair]
    theirs, record = computed(model, [floor, *files], args), evaluated(model, files, args)
    kld = dict(zip(files, divergences(record), strict=True))
    size = {file: row["size"]["weight_bytes"] for file, row in zip(files, record["models"][1:], strict=True)}
    rows, missed = [], []
    for name, (rtn, gptq) in pairs.items():
        assert size[rtn] == size[gptq]
        rows.append([name, f"{size[gptq] / 1e6:.2f}"])
        for of in (kld, theirs):
            rows[-1] += [f"{of[rtn]:.5f}", f"{of[gptq]:.5f}", f"{of[gptq] / of[rtn]:.2f}"]
        if kld[gptq] > limits[name] * kld[rtn]:
            missed.append(f"{stem} {name}: {kld[gptq] / kld[rtn]:.2f} of {limits[name]}")
    return rows, theirs[floor], missed


GGUF_HEAD = ["type", "MB"]
GGUF_HEAD += [f"{by}, {of}" for by in ("eval", "llama.cpp") for of in ("KL: imatrix", "KL: gptq", "ratio")]


def by_gguf_type(args: argparse.Namespace, folder: Path) -> list[str]:
    texts, missed = [], []
    for number, model in enumerate(args.models):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        rows, floor, short = gguf_rows(model, place, CODE_BOOKS if args.i_quants else LIMITS, args)
        note = f"\n{Path(model).name}, {args.text.name}, context {args.ctx}, first {args.limit} tokens. "
        texts.append(table(GGUF_HEAD, rows, left=1) + note + f"llama.cpp's F16 file has {floor:.5f}.\n")
        missed += short
    show(args, "i-quants" if args.i_quants else "gguf", "\n".join(texts), MEASUREMENTS / "gguf.md")
    return missed


# experts

CHOICES = ("routed", "all", "shrink")
FEW = (64, 16, 4, 1)  # calibration sequences
FEW_BITS = 3  # of the comparison by few tokens: differences show earlier


def starved_rounded(own, layer, choice):
    """`SiteStatistics.mixed` of a fourth choice, `rtn`: an expert whose tokens are fewer than its inputs is
    rounded to nearest, as error feedback does without second moments."""
    if own.tokens >= len(own.hessian):
        return own
    even = torch.eye(len(own.hessian), device=layer.hessian.device) * layer.hessian.diagonal().mean()
    return SiteStatistics(own | {Statistic.HESSIAN: even}, own.tokens)


def by_expert_choice(args: argparse.Namespace, folder: Path) -> list[str]:
    (model, *_), document = args.models, ROOT / "docs/experts.md"
    jobs = {f"rtn {bits} bit": (GPTQ[f"rtn {bits} bit"], "shrink") for bits in (4, 3)}
    for bits in (4, 3):
        one = GPTQ[f"gptq {bits} bit"]
        jobs |= {f"gptq {bits} bit, --experts {choice}": (one, choice) for choice in CHOICES}
    jobs |= {name: (OTHERS[name], "shrink") for name in ("awq 4 bit", "awq gptq 4 bit")}
    made = [
        quantize(model, folder, name, one, RunOptions(experts=choice)) for name, (one, choice) in jobs.items()
    ]
    record = evaluated(model, made, args)
    show(args, "mixture", every_metric(record, ["original", *jobs]), document)
    kld = dict(zip(jobs, divergences(record), strict=True))
    missed = [f"{n} bit" for n in (4, 3) if kld[f"gptq {n} bit, --experts shrink"] > kld[f"rtn {n} bit"]]
    rows = []
    for samples in FEW:
        made = {}
        for choice in ("rtn", *CHOICES):
            patch = mock.patch.object(SiteStatistics, "mixed", starved_rounded)
            with patch if choice == "rtn" else nullcontext():
                run = RunOptions(experts="routed" if choice == "rtn" else choice)
                one, text = ("gptq", {"bits": FEW_BITS}), CalibrationOptions(samples=samples)
                made[choice] = quantize(model, folder, f"{choice} by {samples}", one, run, text)
        found = dict(zip(made, divergences(evaluated(model, made.values(), args)), strict=True))
        manifest = json.loads(Path(made["routed"], "quantkit.json").read_text())
        tokens = sorted(row["tokens"] for row in manifest["linears"] if row.get("tokens") is not None)
        rows.append([str(samples), f"{tokens[0]}, {tokens[len(tokens) // 2]}"])
        rows[-1] += [f"{value:.4f}" for value in found.values()]
        if found.pop("shrink") >= max(found.values()):
            missed.append(f"{samples} sequences")
    head = ["sequences of 512", "tokens of an expert: least, median", "rtn if starved", *CHOICES]
    show(args, "starved", table(head, rows, left=0), document)
    args.limit = args.limit or 10240
    rows, _, _ = gguf_rows(model, folder, {"Q4_K_M": 1.0, "Q3_K_M": 1.0}, args)
    rows = [[row[0], *row[2:]] for row in rows]
    show(args, "mixture-gguf", table([GGUF_HEAD[0], *GGUF_HEAD[2:]], rows, left=1), document)
    return [f"--experts shrink is above what it has to beat: {where}" for where in missed]


# auto

PRESETS = {  # engine and further flags -> presets whose bits are the budgets
    ("transformers",): ("3 bit g128", "3 bit g64", "3 bit g32"),
    ("llama.cpp",): ("Q2_K", "Q3_K_M", "Q4_K_M"),
    ("any", "--no-sym"): ("3 bit g128",),
}
STRONGEST = ["--set", "quant.solver=yaqa"]
UNIFORM, IMATRIX = 0.7, 0.5  # of the uniform preset's divergence, and of the imatrix file's, at most
AUTO_HEAD = ["model", "engine", "size of", "bits/weight", "uniform: predicted", "uniform: measured"]
AUTO_HEAD += ["searched: predicted", "searched: measured", "searched / uniform", "yaqa: measured"]
AUTO_HEAD += ["yaqa / uniform", "imatrix: measured", "searched / imatrix", "yaqa / imatrix"]


def searched(
    model: str, folder: Path, engine: str, more: list[str], preset: str, args: argparse.Namespace
) -> dict:
    """Bits and divergences of a search and of what it compares with; None for what does not apply."""
    output = folder / f"out{'.gguf' if engine == 'llama.cpp' else ''}"
    common = ["auto", model, "--engine", engine, *more, "-o", output, "--json", "--overwrite"]
    common += ["--samples", args.samples, "--search-tokens", args.search_tokens]
    common += ["--text", args.text, "--ctx", args.ctx, "--limit", args.limit]
    common += ["--sensitivities", folder / f"{Path(model).name}-{engine}.json"]
    bits = json.loads(quantkit(*common, "--bpw", "4", "--dry-run"))["presets"][preset]
    record = json.loads(quantkit(*common, "--bpw", repr(bits * (1 + 1e-9))))
    found = {"bits": bits, "uniform": record["uniform"], "searched": record["searched"]}
    found |= {"recipe": record["recipe"] if record["kept"] == "searched" else None, "best": None}
    found["imatrix"] = None
    if engine == "llama.cpp":  # llama-quantize's file of this type
        place = folder / f"{preset}.gguf"
        made = ["-t", preset, "--solver", "rtn", "-o", place, "--samples", args.samples, "--overwrite"]
        quantkit("gguf", model, *made)
        (found["imatrix"],) = divergences(evaluated(model, [place], args))
    return found


def with_best(row: dict, model: str, folder: Path, args: argparse.Namespace) -> dict:
    """A row with the searched recipe by the stronger solver, where the search won."""
    if row["recipe"] is None or row["best"] is not None:
        return row
    output, recipe = folder / f"best{'.gguf' if row['imatrix'] else ''}", folder / "best.yaml"
    recipe.write_text(row["recipe"])
    quantkit("run", recipe, *STRONGEST, "-o", output, "--overwrite")
    return row | {"best": divergences(evaluated(model, [output], args))[0]}


def auto_cells(row: dict) -> list[str]:
    """A row's cells after its names; empty for what does not apply."""
    uniform, found, best, imatrix = row["uniform"], row["searched"], row["best"], row["imatrix"]

    def of(value: float | None, other: float | None) -> str:
        return "" if value is None or other is None else f"{value / other:.2f}"

    cells = [f"{row['bits']:.3f}"]
    cells += [f"{one[key]:.5f}" for one in (uniform, found) for key in ("predicted_kld", "kld")]
    cells += [of(found["kld"], uniform["kld"]), f"{best:.5f}" if best else "", of(best, uniform["kld"])]
    return cells + [f"{imatrix:.5f}" if imatrix else "", of(found["kld"], imatrix), of(best, imatrix)]


def by_search(args: argparse.Namespace, folder: Path) -> list[str]:
    rows, missed, store = [], [], folder / "rows.json"
    asked = repr([args.text.name, args.ctx, args.limit, args.samples, args.search_tokens])
    known = json.loads(store.read_text()) if store.exists() else {}
    for model in args.models:
        for (engine, *more), presets in PRESETS.items():
            for preset in presets if args.only in ("", engine) else ():
                named = [Path(model).name, " ".join([engine, *more]), preset]
                where = " ".join(named)
                key = f"{where} {asked}"
                row = known.get(key) or searched(model, folder, engine, more, preset, args)
                known[key] = with_best(row, model, folder, args) if args.best else row
                store.write_text(json.dumps(known, indent=1))
                rows.append([*named, *auto_cells(known[key])])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
                uniform, imatrix = row["uniform"]["kld"], row["imatrix"]
                against, name, limit = (
                    (imatrix, "imatrix", IMATRIX) if imatrix else (uniform, "uniform", UNIFORM)
                )
                if (ratio := row["searched"]["kld"] / against) > limit:
                    missed.append(f"{where}: {ratio:.2f} of {name}")
    filled = [k for k in range(len(AUTO_HEAD)) if any(row[k] for row in rows)]
    head, *rows = [[row[k] for k in filled] for row in (AUTO_HEAD, *rows)]
    note = f"\n{args.text.name}, context {args.ctx}, first {args.limit} tokens; "
    note += f"{args.samples} sequences of calibration text, {args.search_tokens} search tokens.\n"
    show(args, "auto", table(head, rows, left=3) + note, ROOT / "docs/auto.md")
    return missed


# distill: student -> how it is made, and the share of its KL divergence that may be left, at most

STUDENTS = {
    "gptq 4 bit": (GPTQ["gptq 4 bit"], 0.96),
    "gptq 3 bit": (GPTQ["gptq 3 bit"], 0.91),
    "gptq 2 bit": (GPTQ["gptq 2 bit"], 0.75),
    "nf4": (OTHERS["nf4"], 1.0),
    "Q4_K_M": (TYPES["Q4_K_M"], 1.0),
    "Q3_K_M": (TYPES["Q3_K_M"], 0.985),
}


def by_student(args: argparse.Namespace, folder: Path) -> list[str]:
    (model, *_), rows, missed = args.models, [], []
    for name, (made, share) in STUDENTS.items():
        if args.only not in name:
            continue
        student = quantize(model, folder, name, made)
        out = Path(student).with_stem(f"{Path(student).stem}-distilled")
        kept = folder / f"{out.stem}.json"
        if not out.exists() or not kept.exists():
            again = "--resume" if Path(f"{out}.partial").exists() else "--overwrite"
            asked = [model, student, "-o", out, "--samples", args.samples, "--seqlen", "256", again]
            kept.write_text(quantkit("distill", *asked, "--json"))
        record = json.loads(kept.read_text())
        measured = evaluated(model, [student, out], args)
        size, grown = (row["size"]["weight_bytes"] for row in measured["models"][1:])
        kld, left = divergences(measured)
        stages = [f"{stage['after' if stage['kept'] else 'before']:.5f}" for stage in record["stages"]]
        rows.append([name, f"{size / 1e6:.2f} MB", f"{kld:.5f}", f"{left:.5f}", f"{left / kld - 1:+.1%}"])
        rows[-1].append(" → ".join([f"{record['before']:.5f}", *stages]))
        if grown != size or not left <= share * kld:
            missed.append(f"{name}: {left:.5f} of {kld:.5f}, {grown} bytes of {size}")
    by_stage = "held-out KL: before → after stage 1 → after stage 2"
    head = ["student", "size", "KL before", "KL after", "change", by_stage]
    show(args, "distilled", table(head, rows, left=1), ROOT / "docs/distill.md")
    return missed


# specdec

COPIES = {"nf4": ("nf4", {})} | {
    f"gptq, {bits} bit": ("gptq", {"bits": bits, "group_size": 32}) for bits in (4, 3, 2)
}


def by_draft(args: argparse.Namespace, folder: Path) -> list[str]:
    """The first table is what was measured here. The second needs no clock: the acceptance rate as counted,
    and the draft cost from the bytes that a step reads where weights are read packed."""
    model, found = args.models[0], {}
    copies = [quantize(model, folder, name, made) for name, made in COPIES.items()]
    sizes = [f"--{flag}={getattr(args, flag)}" for flag in ("prompts", "tokens", "repeats", "k")]
    for temperature in (0.0, 1.0):
        asked = ["specdec", model, *copies, "prompt-lookup", *sizes, f"--temperature={temperature}", "--json"]
        drafts = json.loads(quantkit(*asked))["drafts"]
        found[temperature] = dict(zip([*COPIES, "prompt-lookup"], drafts, strict=True))
    rows = []
    for temperature, drafts in found.items():
        for name, draft in drafts.items():
            four = next(row for row in draft["swept"] if row["k"] == 4)
            best, theory = draft["measured"], draft["in_theory"]
            rows.append([name, f"temperature {temperature:g}" if temperature else "greedy"])
            rows[-1] += [f"{draft['alpha']:.2f}", f"{four['tokens_per_step']:.2f}", f"{draft['cost']:.2f}"]
            rows[-1].append(f"{best['speedup']:.2f}x, {best['k']}")
            told = f"{theory['speedup']:.2f}x, {theory['k']}" if theory["k"] else "do not draft"
            rows[-1].append(told)
    head = ["draft", "text", "α", "tokens a step, k = 4", "c", "measured, best k", "by theory"]
    print(table(head, rows, left=2))
    rows = []
    for name in COPIES:
        drafts = [drafts[name] for drafts in found.values()]
        counted = [f"{row['by_bytes']['speedup']:.2f}x, k = {row['by_bytes']['k']}" for row in drafts]
        rows.append([name, f"{drafts[0]['cost_by_bytes']:.2f}", *counted])
    print(table(["draft", "c by bytes", "greedy", "sampled"], rows, left=1))
    for temperature, drafts in found.items():
        for name, draft in drafts.items():
            if draft["proof"]:
                print(
                    f"{name} at {temperature:g}: {draft['proof']['equal']} of {draft['proof']['texts']} equal"
                )
    return []


# cloze

WORDS = 100  # of a passage at least, before the word to be guessed
STEP = 12  # words between two of them
RECENT = 4  # words: what was said just before would be an echo
COMMON = set(
    """
    about above after again against also another away back because been before being below between both
    came could days done down during each even ever every found from further gave given goes gone great
    hand have having head here himself however into itself just knew know last less like little long
    look looked made make many might mine more most much must myself never nothing once only other
    others over quite rather said same seen shall should since some still such take than that their them
    then there these they thing things think this those though thought three through time told took
    twice under until upon very want well went were what when where whether which while whole will with
    within without work would year years your
    """.split()
)


def passages(text: str) -> list[str]:
    """Passages that end in the word to be guessed, in the order of the text.

    As in LAMBADA (Paperno et al. 2016, section 3) the word is to follow from the passage, hardly from its
    last sentence: here it is one that the passage has had before, and not just before. Nobody has tried these
    passages on people, so not every one can be guessed. Neighbours overlap, and end at least STEP words
    apart.
    """
    found, last = [], -STEP
    tokens = list(re.finditer(r"\S+", text))
    starts = [0] + [k + 1 for k, token in enumerate(tokens[:-1]) if re.search(r"[.!?][\"”’']?$", token[0])]
    for index, token in enumerate(tokens):
        ends = re.fullmatch(r"([A-Za-z]{4,})[.,;:!?]?[\"”’']?", token[0])
        if not ends or ends[1].lower() in COMMON or index - last < STEP:
            continue
        begin = max((start for start in starts if start <= index - WORDS), default=None)
        if begin is None:
            continue
        before = [re.sub(r"\W+$|^\W+", "", other[0]) for other in tokens[begin:index]]
        if ends[1] in before[:-RECENT] and ends[1] not in before[-RECENT:]:
            passage = text[tokens[begin].start() : token.start() + len(ends[1])]
            found.append(" ".join(passage.split()))
            last = index
    return found


def by_passage(args: argparse.Namespace, folder: Path) -> list[str]:
    found = passages((ROOT / "heldout/heldout.txt").read_text(encoding="utf-8"))  # nothing is trained on it
    lines = "".join(json.dumps({"text": passage}, ensure_ascii=False) + "\n" for passage in found)
    (ROOT / "quantkit/evaluation/tasks/cloze.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(found)} passages")
    return []


PARTS = {  # name -> function, defaults of its flags
    "methods": (by_method, {}),
    "gguf": (by_gguf_type, {"limit": 10240}),
    "experts": (by_expert_choice, {"models": [str(ROOT / "tests/data/demo-moe-8m")]}),
    "auto": (by_search, {"limit": 10240, "samples": 128}),
    "distill": (by_student, {"limit": 40960, "samples": 128}),
    "specdec": (by_draft, {}),
    "cloze": (by_passage, {}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=PARTS)
    add("models", nargs="*", metavar="MODEL")
    add("--text", type=Path, default=ROOT / "heldout/heldout.txt", help="to measure on")
    add("--ctx", type=int, default=256)
    add("--limit", type=int, help="tokens of the text")
    add("--samples", type=int, help="sequences of calibration or training text")
    add("--only", default="", help="rows that contain this, or one engine of auto")
    add("--keep", type=Path, help="folder for what is made")
    add("--write", action="store_true", help="put the tables where they belong")
    add("--i-quants", action="store_true", help="of gguf: the types of 2 and 3 bits")
    add("--search-tokens", type=int, default=4096, help="of auto")
    add("--best", action="store_true", help="of auto: the searched recipes by yaqa, too")
    for flag, value in (("prompts", 8), ("tokens", 64), ("repeats", 3)):
        add(f"--{flag}", type=int, default=value, help="of specdec")
    add("--k", default="1,2,4,8", help="of specdec: drafted tokens")
    args = parser.parse_args()
    run, defaults = PARTS[args.part]
    for name, value in ({"models": [str(DEMO)]} | defaults).items():
        setattr(args, name, getattr(args, name) or value)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        missed = run(args, folder)
    if missed:
        sys.exit(f"error: not as claimed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
