"""The printed result: first whether drafting pays, then the figures, then whether the text is unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from quantkit.errors import count
from quantkit.tables import make_table, megabytes, print_line

SHOWN_PARTINGS = 3  # differences that are printed
LEGEND = (
    "tokens: of a step, which is a pass of the target; by α: (1 − α^(k+1)) / (1 − α). α: a drafted token "
    "is accepted. c: drafting a token, in steps of the target alone; v: checking k + 1 tokens, likewise. "
    "theory: tokens / (k c + 1), as if v were 1. decode: measured, after the first tokens; net: the whole "
    "call, both prompts included; ± half the range of the repeats."
)


def show(record: Mapping[str, Any], tokenizer: Any, quiet: bool = False) -> None:
    """Print a record of `job.compare`. tokenizer: the target's, to name tokens; quiet: no explanations."""
    console = Console(highlight=False, markup=False)
    for draft in record["drafts"]:
        slows = draft["measured"]["speedup"] <= 1
        print_line(console, verdict(draft), "bold yellow" if slows else "bold green")
    for draft in record["drafts"]:
        console.print()
        print_line(console, f"{draft['draft']} drafts for {record['target']}", "bold")
        table = make_table("k", "tokens", "by α", "α", "c", "v", "theory", "decode", "net", "seconds")
        table.padding = (0, 1, 0, 0)  # ten columns on a narrow terminal
        seconds = f"{draft['alone']['seconds']['median']:.2f}"
        table.add_row("alone", "1.00", "", "", "", "1.00", "", "", "1.00x", seconds)
        for row in draft["swept"]:
            table.add_row(*_row(row))
        console.print(table)
        for text in (*_theory(draft), _memory(draft), *_proof(draft, tokenizer)):
            print_line(console, text)
    if not quiet:
        console.print()
        print_line(console, LEGEND, "dim")
        print_line(console, _conditions(record), "dim")


def verdict(draft: Mapping[str, Any]) -> str:
    """Return a line that says whether drafting pays."""
    best, name = draft["measured"], draft["draft"]
    net = next(row["net"] for row in draft["swept"] if row["k"] == best["k"])
    summary = f"{best['speedup']:.2f}x at best (k = {best['k']})"
    if best["speedup"] <= 1:
        return f"{name}: drafting slows this target down, {summary}"
    if net["low"] <= 1:
        return f"{name}: drafting may pay, {summary}, but {net['low']:.2f}x to {net['high']:.2f}x by repeat"
    return f"{name}: drafting pays, {summary}"


def _row(row: Mapping[str, Any]) -> list[str]:
    names = ("tokens_per_step", "expected_tokens", "alpha", "cost", "check")
    spread = (row["net"]["high"] - row["net"]["low"]) / 2  # unknown for one repeat
    return [
        str(row["k"]),
        *("–" if row[name] is None else f"{row[name]:.2f}" for name in names),
        f"{row['expected']:.2f}x",
        f"{row['decode']['median']:.2f}x",
        f"{row['net']['median']:.2f}x " + (f"±{spread:.2f}" if spread else "±?"),
        f"{row['seconds']['median']:.2f}",
    ]


def _theory(draft: Mapping[str, Any]) -> list[str]:
    alpha, best = draft["alpha"], draft["in_theory"]
    if alpha is None:
        return ["nothing was drafted: the texts repeat nothing"]
    gain = f"{best['speedup']:.2f}x" if best["k"] else "no k gains anything"
    figures = f"α = {alpha:.2f}, c = {draft['cost']:.2f}: {gain}"
    measured = f"{draft['measured']['k']} ({draft['measured']['speedup']:.2f}x net)"
    lines = [f"best k by theory: {best['k'] or 'none'} ({figures}); best measured: {measured}"]
    if draft["draft_memory"] is not None:
        known = draft["by_bytes"]
        gain = f"{known['speedup']:.2f}x at k = {known['k']}" if known["k"] else "no k gains anything"
        lines.append(
            "where a step takes as long as its stored weights take to be read, as on a GPU with one text "
            f"and kernels for this layout (c = {draft['cost_by_bytes']:.2f}), the same α gives {gain}"
        )
    return lines


def _memory(draft: Mapping[str, Any]) -> str:
    parts, known = [], 0
    for name in ("target", "draft"):
        if size := draft[f"{name}_memory"]:
            cache = "a KV cache of unknown size" if size["kv"] is None else f"{megabytes(size['kv'])} KV"
            decoded = ", decoded" if name == "draft" and size["note"] else ""
            parts.append(f"{name} {megabytes(size['weights'])} weights + {cache}{decoded}")
            known += size["weights"] + (size["kv"] or 0)
    return f"memory: {'; '.join(parts)}; together {megabytes(known)}"


def _proof(draft: Mapping[str, Any], tokenizer: Any) -> list[str]:
    proof = draft["proof"]
    if proof is None:
        return ["proof: none; only greedy text can be compared with the target's own"]
    partings = sorted(proof["partings"], key=lambda found: (found["tie"], -(found["margin"] or 0.0)))
    ties = sum(found["tie"] for found in partings)
    summary = f"; {len(partings) - ties} DIFFER, {ties} part at a tie" if partings else ""
    return [
        f"proof: greedy text equals the target's own in {proof['equal']} of {count(proof['texts'], 'text')} "
        f"({count(proof['tokens'], 'token')} one by one){summary}",
        *(_parted(found, tokenizer) for found in partings[:SHOWN_PARTINGS]),
    ]


def _parted(parted: Mapping[str, Any], tokenizer: Any) -> str:
    where = f"  text {parted['prompt'] + 1}, k = {parted['k']}, token {parted['index'] + 1}: "
    if parted["token"] is None:
        return f"{where}one text ends, the other goes on"
    found, own = (repr(tokenizer.decode([parted[name]])) for name in ("token", "expected"))
    cause = "rounding" if parted["tie"] else "more than rounding explains"
    return (
        f"{where}{found} instead of {own}, whose logit is {parted['margin']:.4f} higher; {cause} "
        f"(passes of one token and of many differ by up to {parted['noise']:.4f} here)"
    )


def _conditions(record: Mapping[str, Any]) -> str:
    settings, heat = record["settings"], record["settings"]["temperature"]
    how = f"sampled at temperature {heat:g}" if heat else "greedy"
    return (
        f"{record['drafts'][0]['engine']}, {settings['dtype']} on {settings['device']}, "
        f"{count(settings['threads'], 'thread')}; {count(settings['prompts'], 'prompt')} of "
        f"{settings['prompt_tokens']} tokens ({settings['text']}), up to {settings['tokens']} new ones each, "
        f"{how}, {count(settings['repeats'], 'repeat')} after a warm-up, interleaved"
    )
