"""What was measured of batching: tables, a record (bench-batching-1.json describes it) and two plots."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from quantkit.serving.bench.batching.measurement import Outcome, Result
from quantkit.tables import make_table, print_facts, print_line

if TYPE_CHECKING:  # matplotlib takes a second, which --json has no use for
    from matplotlib.figure import Figure

SCHEMA = "quantkit.bench-batching/1"
PADDING = 0.1  # inches around the panels: a browser's letters are taller than matplotlib thinks
IDLE_MACHINE = 0.5  # share of time that is computed below which the trace measures waiting
SHADES = (1.0, 0.45)  # of slots used, and held without use


def record(result: Result) -> dict:
    """The versioned JSON: the trace, request by request, and every strategy's figures and answers' times."""
    told = asdict(result)
    for outcome, made in zip(told["outcomes"], result.outcomes, strict=True):
        del outcome["replay"]
        if made.replay is not None:
            outcome["requests"] = [
                {"arrival": served.arrival, "first_token": served.first, "done": served.done}
                for served in made.replay.requests
            ]
    for told_proof, proof in zip(told["proofs"], result.proofs, strict=True):
        told_proof["gap"] = proof.gap if proof.gap < float("inf") else None  # JSON has no infinity
        told_proof["holds"] = proof.holds
    return {"schema": SCHEMA} | told


def show(result: Result, console: Console) -> None:
    """How it was measured, speed, waste, and whether the answers are the same."""
    settings = result.settings
    dynamic = f", dynamic batches wait {settings.wait:g} s" if "dynamic" in settings.strategies else ""
    print_facts(
        console,
        {
            "model": f"{result.model}, {result.weights}, {result.attention} attention",
            "trace": f"{result.trace.describe()}",
            "from": result.trace.origin,
            "measured": f"{result.dtype} on {result.device}, {settings.size} sequences at once{dynamic}; "
            f"the median of {result.repeats} rounds after a warm-up, ± half their range; waiting by a "
            "virtual clock",
        },
    )
    done = [outcome for outcome in result.outcomes if outcome.figures is not None]
    if done:
        console.print(_speeds(done))
        console.print(_waste(done))
    for outcome in result.outcomes:
        if outcome.refused:
            print_line(console, f"{outcome.strategy} refused: {outcome.refused}", style="yellow")
    _print_notes(result, done, console)


def _speeds(done: list[Outcome]) -> Table:
    """Throughput; latency and time to the first token in seconds."""
    table = make_table("batching", "tok/s", "±", "×", "req/s", "p50", "p90", "p99", "1st p50", "p99")
    for outcome in done:
        found, speeds = outcome.figures, outcome.tokens_per_second
        half = (max(speeds) - min(speeds)) / 2 / found.tokens_per_second
        table.add_row(
            outcome.strategy,
            _short(found.tokens_per_second),
            f"{half:.0%}",
            f"{outcome.ratio:.2f}",
            _short(found.requests_per_second),
            *(_short(found.latency[name]) for name in ("p50", "p90", "p99")),
            *(_short(found.first_token[name]) for name in ("p50", "p99")),
        )
    return table


def _waste(done: list[Outcome]) -> Table:
    table = make_table("batching", "padded", "idle", "KV used", "held", "of it", "reserved", "of it")
    for outcome in done:
        found = outcome.figures
        table.add_row(
            outcome.strategy,
            f"{found.padded:.1%}",
            f"{found.idle:.1%}",
            f"{found.used:,.0f}",
            f"{found.held:,.0f}",
            f"{found.used_of_held:.0%}",
            f"{found.reserved:,.0f}",
            f"{found.used_of_reserved:.0%}",
        )
    return table


def _short(value: float) -> str:
    """`0.08`, `4.20`, `17.0`, `1,234`."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _print_notes(result: Result, done: list[Outcome], console: Console) -> None:
    if done:
        print_line(
            console,
            "p50, p90, p99: seconds from arrival to the answer; 1st: to the first token. padded: of the "
            "prompts' positions; idle: of the decoding slots, by sequences that were done. KV: tokens in the "
            "cache, the slots held for them, and those that a cache of fixed size reserves, averaged over "
            "the computed time",
        )
    if len(done) > 1:
        first, last = done[0], done[-1]
        times = last.figures.used_of_reserved / first.figures.used_of_reserved
        print_line(
            console,
            f"of the cache it reserves {last.strategy} fills {times:.1f} times as much as {first.strategy}",
        )
    slack = [outcome.strategy for outcome in done if outcome.figures.busy < IDLE_MACHINE]
    if slack:
        print_line(
            console,
            f"{', '.join(slack)}: computed less than half of the time, so tokens/s is the trace's more than "
            "the machine's: a higher rate shows what it can do",
            style="yellow",
        )
    for proof in result.proofs:
        ties = f", {proof.ties} part at a tie" if proof.ties else ""
        text = f"{proof.strategy} wrote what {proof.against} wrote: {proof.alike} of {proof.requests}{ties}"
        if not proof.holds:
            text += f", {proof.differing} differ (by {proof.gap:.2g} of the largest logit)"
        print_line(console, f"{text} (float32)", style=None if proof.holds else "red")
    if result.unproven:
        print_line(console, f"answers not compared: {result.unproven}", style="yellow")


def draw(result: Result, figure: Figure) -> None:
    """Latency, as the share of requests answered in a time or less; and the cache's token slots, averaged.

    figure: an empty one, 720 × 360 points or more, made under `drawing.theme()`.
    """
    from quantkit.evaluation.comparison.drawing import FAINT, MUTED, SERIES

    done = [outcome for outcome in result.outcomes if outcome.replay is not None]
    left, right = figure.subplots(1, 2)
    for place, outcome in enumerate(done):
        latencies = sorted(served.done - served.arrival for served in outcome.replay.requests)
        shares = [(index + 1) / len(latencies) for index in range(len(latencies))]
        colour = SERIES[place % len(SERIES)]
        left.step([0, *latencies], [0, *shares], where="post", color=colour, label=outcome.strategy)
        found = outcome.figures
        right.barh(place, found.reserved, color=FAINT, height=0.7)
        right.barh(place, found.held, color=colour, alpha=SHADES[1], height=0.7)
        right.barh(place, found.used, color=colour, alpha=SHADES[0], height=0.7)
    for share in (0.5, 0.9, 0.99):
        left.axhline(share, color=MUTED, ls="--", lw=0.7)
        left.annotate(f"p{share * 100:g}", (1.01, share), xycoords=("axes fraction", "data"), color=MUTED,
                      va="center", size=10)  # fmt: skip
    left.set_title("Requests answered", loc="left", color=MUTED)
    left.set_xlabel("seconds after arrival", loc="right")
    left.set(xlim=(0, None), ylim=(0, 1.05))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_title("KV slots: used, held, reserved", loc="left", color=MUTED)
    right.set_xlabel("tokens, averaged over time", loc="right")
    right.set_yticks(range(len(done)), [outcome.strategy for outcome in done])
    right.invert_yaxis()
    right.grid(visible=False, axis="y")
    figure.legend(loc="outside upper left", ncols=max(1, len(done)))
    if engine := figure.get_layout_engine():
        engine.set(h_pad=PADDING)
