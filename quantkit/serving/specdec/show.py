"""The printed result: first whether drafting pays, then the figures, then whether the text is unchanged."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from quantkit.errors import count
from quantkit.evaluation.comparison.report import Table
from quantkit.tables import make_table, megabytes, print_line

SHOWN_PARTINGS = 3  # differences that are printed
COLUMNS = ("k", "tokens", "by α", "α", "c", "v", "theory", "decode", "net", "seconds")
COMPACT = 76  # characters of a table with all columns
NO_GAIN = "no k gains anything"
LEGEND = (
    "tokens: of a step, which is a pass of the target; by α: (1 − α^(k+1)) / (1 − α). α: a drafted token "
    "is accepted. c: drafting a token, in steps of the target alone; v: checking k + 1 tokens, likewise. "
    "theory: tokens / (k c + 1), as if v were 1. decode: measured, after the first tokens; net: the whole "
    "call, with the time to read the prompt; ± half the range of the repeats."
)


def show(record: Mapping[str, Any], tokenizer: Any, quiet: bool = False) -> None:
    """Print a record of `measure.compare`. tokenizer: the target's; quiet: no explanations."""
    console = Console(highlight=False, markup=False)
    for draft in record["drafts"]:
        slows = draft["measured"]["speedup"] <= 1
        print_line(console, verdict(draft), "bold yellow" if slows else "bold green")
    for draft in record["drafts"]:
        console.print()
        print_line(console, f"{draft['draft']} drafts for {record['target']}", "bold")
        seconds = f"{draft['alone']['seconds']['median']:.2f}"
        alone = ["alone", "1.00", "", "", "", "1.00", "", "", "1.00x", seconds]
        _print_rows(console, [alone, *map(_cells, draft["swept"])])
        for text in (*_theory(draft), _memory(draft), *_proof(draft, tokenizer)):
            print_line(console, text)
    if not quiet:
        console.print()
        print_line(console, LEGEND, "dim")
        print_line(console, _conditions(record), "dim")


def _print_rows(console: Console, rows: list[list[str]]) -> None:
    """Print one compact table, or several on a narrow console."""
    if console.width < COMPACT:
        return Table(COLUMNS, [("", rows)]).print(console)
    table = make_table(*COLUMNS)
    table.padding = (0, 1, 0, 0)
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def verdict(draft: Mapping[str, Any]) -> str:
    """Return a line that says whether drafting pays."""
    best, name = draft["measured"], draft["draft"]
    net = next(swept["net"] for swept in draft["swept"] if swept["k"] == best["k"])
    summary = f"{best['speedup']:.2f}x at best (k = {best['k']})"
    if best["speedup"] <= 1:
        return f"{name}: drafting slows this target down, {summary}"
    if net["low"] <= 1:
        return f"{name}: drafting may pay, {summary}, but {net['low']:.2f}x to {net['high']:.2f}x by repeat"
    return f"{name}: drafting pays, {summary}"


def _cells(swept: Mapping[str, Any]) -> list[str]:
    """Return the table row of one k."""
    names = ("tokens_per_step", "expected_tokens", "alpha", "cost", "check")
    spread = (swept["net"]["high"] - swept["net"]["low"]) / 2  # unknown for one repeat
    return [
        str(swept["k"]),
        *("–" if swept[name] is None else f"{swept[name]:.2f}" for name in names),
        f"{swept['expected']:.2f}x",
        f"{swept['decode']['median']:.2f}x",
        f"{swept['net']['median']:.2f}x " + (f"±{spread:.2f}" if spread else "±?"),
        f"{swept['seconds']['median']:.2f}",
    ]


def _theory(draft: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the best k by theory: as measured, and where steps take as long as reading weights."""
    alpha, best, by_bytes = draft["alpha"], draft["in_theory"], draft["by_bytes"]
    if alpha is None:
        yield "nothing was drafted: the texts repeat nothing"
        return
    gain = f"{best['speedup']:.2f}x" if best["k"] else NO_GAIN
    measured = f"{draft['measured']['k']} ({draft['measured']['speedup']:.2f}x net)"
    figures = f"α = {alpha:.2f}, c = {draft['cost']:.2f}: {gain}"
    yield f"best k by theory: {best['k'] or 'none'} ({figures}); best measured: {measured}"
    if draft["draft_memory"] is not None:
        gain = f"{by_bytes['speedup']:.2f}x at k = {by_bytes['k']}" if by_bytes["k"] else NO_GAIN
        yield (
            "where a step takes as long as its stored weights take to be read, as on a GPU with one text "
            f"and kernels for this layout (c = {draft['cost_by_bytes']:.2f}), with the same α: {gain}"
        )


def _memory(draft: Mapping[str, Any]) -> str:
    models, total = [], 0
    for name in ("target", "draft"):
        if memory := draft[f"{name}_memory"]:
            cache = "a KV cache of unknown size" if memory["kv"] is None else f"{megabytes(memory['kv'])} KV"
            decoded = ", decoded" if name == "draft" and memory["note"] else ""
            models.append(f"{name} {megabytes(memory['weights'])} weights + {cache}{decoded}")
            total += memory["weights"] + (memory["kv"] or 0)
    return f"memory: {'; '.join(models)}; together {megabytes(total)}"


def _proof(draft: Mapping[str, Any], tokenizer: Any) -> Iterator[str]:
    """Yield how many texts equal the target's own, and the differences, the largest first."""
    proof = draft["proof"]
    if proof is None:
        yield "proof: none; only greedy text can be compared with the target's own"
        return
    partings = sorted(proof["partings"], key=lambda parting: (parting["tie"], -(parting["margin"] or 0.0)))
    ties = sum(parting["tie"] for parting in partings)
    summary = f"; {len(partings) - ties} DIFFER, {ties} part at a tie" if partings else ""
    yield (
        f"proof: greedy text equals the target's own in {proof['equal']} of {count(proof['texts'], 'text')} "
        f"({count(proof['tokens'], 'token')} one by one){summary}"
    )
    for parting in partings[:SHOWN_PARTINGS]:
        where = f"  text {parting['prompt'] + 1}, k = {parting['k']}, token {parting['index'] + 1}: "
        if parting["token"] is None:
            yield f"{where}one text ends, the other goes on"
            continue
        token, expected = (repr(tokenizer.decode([parting[name]])) for name in ("token", "expected"))
        cause = "rounding" if parting["tie"] else "more than rounding explains"
        yield (
            f"{where}{token} instead of {expected}, whose logit is {parting['margin']:.4f} higher; {cause} "
            f"(passes of one token and of many differ by up to {parting['noise']:.4f} here)"
        )


def _conditions(record: Mapping[str, Any]) -> str:
    settings, temperature = record["settings"], record["settings"]["temperature"]
    how = f"sampled at temperature {temperature:g}" if temperature else "greedy"
    return (
        f"{record['drafts'][0]['engine']}, {settings['dtype']} on {settings['device']}, "
        f"{count(settings['threads'], 'thread')}; {count(settings['prompts'], 'prompt')} of "
        f"{settings['prompt_tokens']} tokens ({settings['text']}), up to {settings['tokens']} new ones each, "
        f"{how}, {count(settings['repeats'], 'repeat')} after a warm-up, interleaved"
    )
