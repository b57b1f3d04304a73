"""The result on a terminal: first whether drafting pays, then the figures, then the proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console

from quantkit.errors import count
from quantkit.serving.specdec.compare import Comparison
from quantkit.serving.specdec.lossless import Parting, Uniformity
from quantkit.serving.specdec.runs import Swept
from quantkit.serving.specdec.sweep import Greedy, Measured
from quantkit.serving.specdec.theory import MOST
from quantkit.tables import make_table, megabytes, print_line

BAR = 8  # columns of the longest bar; four histograms stand side by side on 80
SHOWN = 3  # partings that are told one by one


def show(made: Comparison, tokenizer: Any, quiet: bool = False) -> None:
    """Print everything. tokenizer: the target's, to name tokens; quiet: no explanations."""
    console = Console(highlight=False, markup=False)
    for draft in made.drafts:
        print_line(console, verdict(draft), "bold yellow" if draft.slows else "bold green")
    for draft in made.drafts:
        console.print()
        _show_draft(console, draft, made, tokenizer)
    if not quiet:
        console.print()
        print_line(console, LEGEND, "dim")
        print_line(console, _conditions(made), "dim")


LEGEND = (
    "tokens: of a step, which is a pass of the target; by α: (1 − α^(k+1)) / (1 − α). α: a drafted token "
    "is accepted. c: drafting a token, in steps of the target alone; v: checking k + 1 tokens, likewise. "
    "theory: tokens / (k c + 1), as if v were 1. decode: measured, after the first tokens; net: the whole "
    "call, both prompts included; ± half the range of the repeats. Bars: steps by accepted tokens."
)


def verdict(draft: Measured) -> str:
    """In a line, and first of all, whether it pays."""
    best, name = draft.measured, draft.draft
    net = next(row.net for row in draft.swept if row.k == best.k)
    said = f"{best.speedup:.2f}x at best (k = {best.k})"
    if draft.slows:
        return f"{name}: drafting slows this target down, {said}"
    if net.low <= 1:
        return f"{name}: drafting may pay, {said}, but {net.low:.2f}x to {net.high:.2f}x in its repeats"
    return f"{name}: drafting pays, {said}"


def _show_draft(console: Console, draft: Measured, made: Comparison, tokenizer: Any) -> None:
    print_line(console, f"{draft.draft} drafts for {made.target}", "bold")
    table = make_table("k", "tokens", "by α", "α", "c", "v", "theory", "decode", "net", "seconds")
    table.padding = (0, 1, 0, 0)  # ten columns on a narrow terminal
    table.add_row("alone", "1.00", "", "", "", "1.00", "", "", "1.00x", f"{draft.alone.seconds.median:.2f}")
    for row in draft.swept:
        table.add_row(*_row(row))
    console.print(table)
    console.print(Columns([_histogram(row) for row in draft.swept if row.histogram], padding=(0, 2)))
    for text in (*_theory(draft), _memory(draft), *_proof(draft, made, tokenizer)):
        print_line(console, text)


def _row(row: Swept) -> Sequence[str]:
    spread = (row.net.high - row.net.low) / 2  # of one repeat, nothing is known
    return (
        str(row.k),
        f"{row.tokens_per_step:.2f}",
        f"{row.expected_tokens:.2f}",
        "–" if row.alpha is None else f"{row.alpha:.2f}",
        f"{row.cost:.2f}",
        f"{row.check:.2f}",
        f"{row.expected:.2f}x",
        f"{row.decode.median:.2f}x",
        f"{row.net.median:.2f}x " + (f"±{spread:.2f}" if spread else "±?"),
        f"{row.seconds.median:.2f}",
    )


def _histogram(row: Swept) -> str:
    """Bars of a character that every terminal has, longest for the commonest."""
    total, most = sum(row.histogram), max(row.histogram)
    lines = [f"k = {row.k}, {count(total, 'step')}"]
    for accepted, steps in enumerate(row.histogram):
        bar = "█" * round(BAR * steps / max(1, most))
        lines.append(f"{accepted:2d} {bar:{BAR}s} {steps / max(1, total):4.0%}")
    return "\n".join(lines)


def _theory(draft: Measured) -> list[str]:
    if draft.alpha is None:
        return ["nothing was found to draft: the texts say nothing twice"]
    best, judged = draft.in_theory, sum(row.judged for row in draft.swept)
    error = math.sqrt(draft.alpha * (1 - draft.alpha) / judged)
    told = f"α = {draft.alpha:.2f} ±{error:.2f}, c = {draft.cost:.2f}"
    if best.k:
        first = f"best k by theory: {_many(best.k)} ({told}: {best.speedup:.2f}x)"
    else:
        first = f"best k by theory: none ({told}: no k gains anything)"
    measured = draft.measured
    lines = [f"{first}; best measured: {measured.k} ({measured.speedup:.2f}x net)"]
    if draft.drafting is not None:
        fixed, each = draft.drafting.fixed, draft.drafting.per_token
        lines.append(
            f"drafting k tokens takes {fixed:.2f} + {each:.2f} k steps of the target: the first part is the "
            "engine's own, once a pass"
        )
    if draft.draft_memory is not None:
        known = draft.by_bytes
        gain = f"{known.speedup:.2f}x at k = {_many(known.k)}" if known.k else "no k gains anything"
        lines.append(
            "where a step takes as long as its stored weights take to be read, as on a GPU with one text "
            f"and kernels for this layout (c = {draft.cost_by_bytes:.2f}), the same α gives {gain}"
        )
    return lines


def _many(k: int) -> str:
    return f"{k} or more" if k == MOST else str(k)


def _memory(draft: Measured) -> str:
    big, small = draft.target_memory, draft.draft_memory
    parts = [f"target {_bytes(big.weights, big.kv)}"]
    total = [big.weights, big.kv]
    if small is not None:
        packed = ", decoded" if small.note else ""
        parts.append(f"draft {_bytes(small.weights, small.kv)}{packed}")
        total += [small.weights, small.kv]
    known = sum(filter(None, total))
    return f"memory: {'; '.join(parts)}; together {megabytes(known)}"


def _bytes(weights: int, kv: int | None) -> str:
    return f"{megabytes(weights)} weights + " + (
        "a KV cache of unknown size" if kv is None else f"{megabytes(kv)} KV"
    )


def _proof(draft: Measured, made: Comparison, tokenizer: Any) -> list[str]:
    proof = draft.proof
    if isinstance(proof, Uniformity):
        return _sampled(proof, draft)
    if not isinstance(proof, Greedy):
        return ["proof: none; llama.cpp does not tell the distributions that it samples from"]
    if not proof.partings:
        return [
            f"proof: greedy text equals the target's own in {_all_of(proof.texts)}, "
            f"{count(proof.tokens, 'token')} one by one"
        ]
    head = (
        f"proof: greedy text equals the target's own in {proof.equal} of {count(proof.texts, 'text')} "
        f"({count(proof.tokens, 'token')} one by one); "
    )
    ties = sum(parted.tie for parted in proof.partings)
    head += (
        f"{ties} part at a tie"
        if ties == len(proof.partings)
        else (f"{len(proof.partings) - ties} DIFFER, {ties} part at a tie")
    )
    worst = sorted(proof.partings, key=lambda parted: (parted.tie, -(parted.margin or 0.0)))
    lines = [head, *(_parted(parted, tokenizer) for parted in worst[:SHOWN])]
    return lines if len(worst) <= SHOWN else [*lines, f"  … and {len(worst) - SHOWN} more (--json has all)"]


def _parted(parted: Parting, tokenizer: Any) -> str:
    where = f"  text {parted.prompt + 1}, k = {parted.k}, token {parted.index + 1}: "
    if parted.token is None:
        return f"{where}one text ends, the other goes on"
    found, own = (repr(tokenizer.decode([token])) for token in (parted.token, parted.expected))
    if parted.margin is None:
        return f"{where}{found}, which is not among the likeliest, instead of {own}"
    return (
        f"{where}{found} instead of {own}, whose logit is {parted.margin:.4f} higher; {_cause(parted.tie)} "
        f"(passes of one token and of many differ by up to {parted.noise:.4f} here)"
    )


def _cause(tie: bool) -> str:
    return "rounding" if tie else "more than rounding explains"


def _sampled(proof: Uniformity, draft: Measured) -> list[str]:
    said = "follows the target's distribution" if proof.alike else "does NOT follow the target's distribution"
    lines = [
        f"proof: sampled text {said}: χ² = {proof.chi_square:.1f} of {count(proof.tokens, 'token')} in "
        f"{proof.bins} bins, p = {proof.p_value:.3g}"
    ]
    if proof.overlap is not None and draft.alpha is not None:
        lines.append(
            f"α by the two distributions themselves: {proof.overlap:.3f}; by counting: {draft.alpha:.3f}"
        )
    return lines


def _all_of(texts: int) -> str:
    return f"all {texts:,} texts" if texts > 1 else "the text"


def _conditions(made: Comparison) -> str:
    asked = made.settings
    how = f"sampled at temperature {asked.temperature:g}" if asked.temperature else "greedy"
    return (
        f"{made.drafts[0].engine}, {made.dtype} on {made.device}, {count(made.threads, 'thread')}; "
        f"{count(asked.prompts, 'prompt')} of {asked.prompt_tokens} tokens ({made.prompts.source}) and up to "
        f"{asked.tokens} new ones each, {how}, {count(asked.repeats, 'repeat')} after a warm-up, interleaved"
    )
