"""The result on a terminal: first whether drafting pays, then the figures, then the proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console

from quantkit.errors import count
from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec.lossless import Parting
from quantkit.serving.specdec.settings import MOST
from quantkit.tables import make_table, megabytes, print_line

BAR = 8  # columns of the longest bar; four histograms stand side by side on 80
SHOWN = 3  # partings that are told one by one
LEGEND = (
    "tokens: of a step, which is a pass of the target; by α: (1 − α^(k+1)) / (1 − α). α: a drafted token "
    "is accepted. c: drafting a token, in steps of the target alone; v: checking k + 1 tokens, likewise. "
    "theory: tokens / (k c + 1), as if v were 1. decode: measured, after the first tokens; net: the whole "
    "call, both prompts included; ± half the range of the repeats. Bars: steps by accepted tokens."
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
        bars = [_histogram(row) for row in draft["swept"] if row["histogram"]]
        console.print(Columns(bars, padding=(0, 2)))
        for text in (*_theory(draft), _memory(draft), *_proof(draft, tokenizer)):
            print_line(console, text)
    if not quiet:
        console.print()
        print_line(console, LEGEND, "dim")
        print_line(console, _conditions(record), "dim")


def verdict(draft: Mapping[str, Any]) -> str:
    """In a line, and first of all, whether it pays."""
    best, name = draft["measured"], draft["draft"]
    net = next(row["net"] for row in draft["swept"] if row["k"] == best["k"])
    said = f"{best['speedup']:.2f}x at best (k = {best['k']})"
    if best["speedup"] <= 1:
        return f"{name}: drafting slows this target down, {said}"
    if net["low"] <= 1:
        return f"{name}: drafting may pay, {said}, but {net['low']:.2f}x to {net['high']:.2f}x in its repeats"
    return f"{name}: drafting pays, {said}"


def _row(row: Mapping[str, Any]) -> list[str]:
    names = ("tokens_per_step", "expected_tokens", "alpha", "cost", "check")
    spread = (row["net"]["high"] - row["net"]["low"]) / 2  # of one repeat, nothing is known
    return [
        str(row["k"]),
        *("–" if row[name] is None else f"{row[name]:.2f}" for name in names),
        f"{row['expected']:.2f}x",
        f"{row['decode']['median']:.2f}x",
        f"{row['net']['median']:.2f}x " + (f"±{spread:.2f}" if spread else "±?"),
        f"{row['seconds']['median']:.2f}",
    ]


def _histogram(row: Mapping[str, Any]) -> str:
    """Bars of a character that every terminal has, longest for the commonest."""
    total, most = sum(row["histogram"]), max(row["histogram"])
    lines = [f"k = {row['k']}, {count(total, 'step')}"]
    for accepted, steps in enumerate(row["histogram"]):
        bar = "█" * round(BAR * steps / max(1, most))
        lines.append(f"{accepted:2d} {bar:{BAR}s} {steps / max(1, total):4.0%}")
    return "\n".join(lines)


def _theory(draft: Mapping[str, Any]) -> list[str]:
    alpha, best, drafting = draft["alpha"], draft["in_theory"], draft["drafting"]
    if alpha is None:
        return ["nothing was found to draft: the texts say nothing twice"]
    error = acceptance_rate.standard_error(alpha, sum(row["judged"] for row in draft["swept"]))
    told = f"α = {alpha:.2f} ±{error:.2f}, c = {draft['cost']:.2f}"
    gain = f"{best['speedup']:.2f}x" if best["k"] else "no k gains anything"
    measured = f"{draft['measured']['k']} ({draft['measured']['speedup']:.2f}x net)"
    lines = [f"best k by theory: {_many(best['k'])} ({told}: {gain}); best measured: {measured}"]
    if drafting is not None:
        lines.append(
            f"drafting k tokens takes {drafting['fixed']:.2f} + {drafting['per_token']:.2f} k steps of the "
            "target: the first part is the engine's own, once a pass"
        )
    if draft["draft_memory"] is not None:
        known = draft["by_bytes"]
        gain = f"{known['speedup']:.2f}x at k = {_many(known['k'])}" if known["k"] else "no k gains anything"
        lines.append(
            "where a step takes as long as its stored weights take to be read, as on a GPU with one text "
            f"and kernels for this layout (c = {draft['cost_by_bytes']:.2f}), the same α gives {gain}"
        )
    return lines


def _many(k: int) -> str:
    return f"{k} or more" if k == MOST else str(k or "none")


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
        return ["proof: none; llama.cpp does not tell the distributions that it samples from"]
    if proof["kind"] == "sampled":
        return _sampled(proof, draft["alpha"])
    partings = [Parting(**found) for found in proof["partings"]]
    tokens, parted = f"{count(proof['tokens'], 'token')} one by one", len(partings)
    equal = "proof: greedy text equals the target's own in"
    if not parted:
        texts = f"all {proof['texts']:,} texts" if proof["texts"] > 1 else "the text"
        return [f"{equal} {texts}, {tokens}"]
    ties = sum(found.tie for found in partings)
    said = f"{ties} part at a tie" if ties == parted else f"{parted - ties} DIFFER, {ties} part at a tie"
    worst = sorted(partings, key=lambda found: (found.tie, -(found.margin or 0.0)))
    return [
        f"{equal} {proof['equal']} of {count(proof['texts'], 'text')} ({tokens}); {said}",
        *(_parted(found, tokenizer) for found in worst[:SHOWN]),
        *([f"  … and {parted - SHOWN} more (--json has all)"] if parted > SHOWN else []),
    ]


def _parted(parted: Parting, tokenizer: Any) -> str:
    where = f"  text {parted.prompt + 1}, k = {parted.k}, token {parted.index + 1}: "
    if parted.token is None:
        return f"{where}one text ends, the other goes on"
    found, own = (repr(tokenizer.decode([token])) for token in (parted.token, parted.expected))
    if parted.margin is None:
        return f"{where}{found}, which is not among the likeliest, instead of {own}"
    cause = "rounding" if parted.tie else "more than rounding explains"
    return (
        f"{where}{found} instead of {own}, whose logit is {parted.margin:.4f} higher; {cause} "
        f"(passes of one token and of many differ by up to {parted.noise:.4f} here)"
    )


def _sampled(proof: Mapping[str, Any], alpha: float | None) -> list[str]:
    said = "follows" if proof["alike"] else "does NOT follow"
    lines = [
        f"proof: sampled text {said} the target's distribution: χ² = {proof['chi_square']:.1f} of "
        f"{count(proof['tokens'], 'token')} in {proof['bins']} bins, p = {proof['p_value']:.3g}"
    ]
    if proof["overlap"] is not None and alpha is not None:
        lines.append(
            f"α by the two distributions themselves: {proof['overlap']:.3f}; by counting: {alpha:.3f}"
        )
    return lines


def _conditions(record: Mapping[str, Any]) -> str:
    asked, heat = record["settings"], record["settings"]["temperature"]
    how = f"sampled at temperature {heat:g}" if heat else "greedy"
    return (
        f"{record['drafts'][0]['engine']}, {asked['dtype']} on {asked['device']}, "
        f"{count(asked['threads'], 'thread')}; {count(asked['prompts'], 'prompt')} of "
        f"{asked['prompt_tokens']} tokens ({asked['text']}) and up to {asked['tokens']} new ones each, "
        f"{how}, {count(asked['repeats'], 'repeat')} after a warm-up, interleaved"
    )
