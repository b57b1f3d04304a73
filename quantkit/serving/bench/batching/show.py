"""What was measured of batching: a record (bench-batching-1.json describes it), and a report for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.serving.bench.batching.measure import Outcome, Result
from quantkit.tables import figure

SCHEMA = "quantkit.bench-batching/1"
IDLE_MACHINE = 0.5  # share of time that is computed below which the trace measures waiting
SPEEDS = ("batching", "tok/s", "±", "×", "req/s", "p50", "p90", "p99", "1st p50", "p99")
WASTE = ("batching", "padded", "idle", "KV used", "held", "of it", "reserved", "of it")
MEANINGS = (
    "p50, p90, p99: seconds from arrival to the answer; 1st: to the first token. padded: of the prompts' "
    "positions; idle: of the decoding slots, by sequences that were done. KV: tokens in the cache, the slots "
    "held for them, and those that a cache of fixed size reserves, averaged over the computed time"
)


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


def report(result: Result) -> Report:
    """How it was measured, speed, waste, and whether the answers are the same."""
    settings = result.settings
    dynamic = f", dynamic batches wait {settings.wait:g} s" if "dynamic" in settings.strategies else ""
    done = [outcome for outcome in result.outcomes if outcome.figures is not None]
    return Report(
        title=f"Batching of {result.model}",
        facts={
            "model": f"{result.model}, {result.weights}, {result.attention} attention",
            "trace": result.trace.describe(),
            "from": result.trace.origin,
            "measured": f"{result.dtype} on {result.device}, {settings.size} sequences at once{dynamic}; "
            f"the median of {result.repeats} rounds after a warm-up, ± half their range; waiting by a "
            "virtual clock",
        },
        tables=[
            Table(SPEEDS, [("", [_speed(outcome) for outcome in done])]),
            Table(WASTE, [("", [_waste(outcome) for outcome in done])]),
        ],
        notes=list(_notes(result, done)),
        figures=[_latencies(done)],
    )


def _speed(outcome: Outcome) -> list[str]:
    """Throughput; latency and time to the first token in seconds."""
    found, speeds = outcome.figures, outcome.tokens_per_second
    half = (max(speeds) - min(speeds)) / 2 / found.tokens_per_second
    return [
        outcome.strategy,
        figure(found.tokens_per_second),
        f"{half:.0%}",
        f"{outcome.ratio:.2f}",
        figure(found.requests_per_second),
        *(figure(found.latency[name]) for name in ("p50", "p90", "p99")),
        *(figure(found.first_token[name]) for name in ("p50", "p99")),
    ]


def _waste(outcome: Outcome) -> list[str]:
    found = outcome.figures
    return [
        outcome.strategy,
        f"{found.padded:.1%}",
        f"{found.idle:.1%}",
        f"{found.used:,.0f}",
        f"{found.held:,.0f}",
        f"{found.used_of_held:.0%}",
        f"{found.reserved:,.0f}",
        f"{found.used_of_reserved:.0%}",
    ]


def _notes(result: Result, done: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    for outcome in result.outcomes:
        if outcome.refused:
            yield f"{outcome.strategy} refused: {outcome.refused}", "yellow"
    yield MEANINGS, ""
    if len(done) > 1:
        first, last = done[0], done[-1]
        times = last.figures.used_of_reserved / first.figures.used_of_reserved
        more = f"{last.strategy} fills {times:.1f} times as much as {first.strategy}"
        yield f"of the cache it reserves {more}", ""
    if slack := [outcome.strategy for outcome in done if outcome.figures.busy < IDLE_MACHINE]:
        less = "computed less than half of the time, so tokens/s is the trace's more than the machine's"
        yield f"{', '.join(slack)}: {less}: a higher rate shows what it can do", "yellow"
    for proof in result.proofs:
        ties = f", {proof.ties} part at a tie" if proof.ties else ""
        text = f"{proof.strategy} wrote what {proof.against} wrote: {proof.alike} of {proof.requests}{ties}"
        if not proof.holds:
            text += f", {proof.differing} differ (by {proof.gap:.2g} of the largest logit)"
        yield f"{text} (float32)", "" if proof.holds else "red"
    if result.unproven:
        yield f"answers not compared: {result.unproven}", "yellow"


def _latencies(done: Sequence[Outcome]) -> Figure:
    """The share of requests answered in a time or less."""
    series = []
    for place, outcome in enumerate(done):
        latencies = sorted(served.done - served.arrival for served in outcome.replay.requests)
        points = [Point(x, 100 * (index + 1) / len(latencies)) for index, x in enumerate(latencies)]
        series.append(Series(outcome.strategy, tuple(points), place, joined=True))
    return Figure(
        key="latency",
        title="Requests answered",
        caption="The share of requests that were answered within a time after they came.",
        x=Axis("seconds after arrival"),
        y=Axis("% of requests"),
        series=tuple(series),
    )
