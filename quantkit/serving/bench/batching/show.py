"""What was measured of batching, for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import figure

Record = dict[str, Any]
IDLE_MACHINE = 0.5  # share of time that is computed below which the trace measures waiting
SPEEDS = ("batching", "tok/s", "±", "×", "req/s", "p50", "p90", "p99", "1st p50", "p99")
WASTE = ("batching", "padded", "idle", "KV used", "held", "of it", "reserved", "of it")
MEANINGS = (
    "p50, p90, p99: seconds from arrival to the answer; 1st: to the first token. padded: of the prompts' "
    "positions; idle: of the decoding slots, by sequences that were done. KV: tokens in the cache, the slots "
    "held for them, and those that a cache of fixed size reserves, averaged over the computed time"
)


def report(record: Record) -> Report:
    """How it was measured, speed, waste, and whether the answers are the same."""
    settings, trace = record["settings"], record["trace"]
    dynamic = f", dynamic batches wait {settings['wait']:g} s" if "dynamic" in settings["strategies"] else ""
    measured = f"{record['dtype']} on {record['device']}, {settings['size']} sequences at once{dynamic}"
    done = [outcome for outcome in record["outcomes"] if outcome["figures"]]
    return Report(
        title=f"Batching of {record['model']}",
        facts={
            "model": f"{record['model']}, {record['weights']}, {record['attention']} attention",
            "trace": describe(trace["requests"]),
            "from": trace["origin"],
            "measured": f"{measured}; the median of {record['repeats']} rounds after a warm-up, ± half their "
            "range; waiting by a virtual clock",
        },
        tables=[
            Table(SPEEDS, [("", [_speed(outcome) for outcome in done])]),
            Table(WASTE, [("", [_waste(outcome["strategy"], outcome["figures"]) for outcome in done])]),
        ],
        notes=list(_notes(record, done)),
        figures=[_latencies(done)],
    )


def describe(requests: Sequence[Record]) -> str:
    """`32 requests in 3.9 s; prompts 4 to 121 tokens (median 40), outputs …`."""
    arrivals, prompts, outputs = ([row[key] for row in requests] for key in ("arrival", "prompt", "output"))
    lengths = [
        f"{min(found)} to {max(found)} tokens (median {statistics.median(found):g})"
        for found in (prompts, outputs)
    ]
    span = f"{len(requests)} requests in {arrivals[-1] - arrivals[0]:.3g} s"
    return f"{span}; prompts {lengths[0]}, outputs {lengths[1]}"


def _speed(outcome: Record) -> list[str]:
    """Throughput; latency and time to the first token in seconds."""
    found, speeds = outcome["figures"], outcome["tokens_per_second"]
    half = (max(speeds) - min(speeds)) / 2 / found["tokens_per_second"]
    return [
        outcome["strategy"],
        figure(found["tokens_per_second"]),
        f"{half:.0%}",
        f"{outcome['ratio']:.2f}",
        figure(found["requests_per_second"]),
        *(figure(found["latency"][name]) for name in ("p50", "p90", "p99")),
        *(figure(found["first_token"][name]) for name in ("p50", "p99")),
    ]


def _waste(strategy: str, found: Record) -> list[str]:
    return [
        strategy,
        f"{found['padded']:.1%}",
        f"{found['idle']:.1%}",
        f"{found['used']:,.0f}",
        f"{found['held']:,.0f}",
        f"{used(found, 'held'):.0%}",
        f"{found['reserved']:,.0f}",
        f"{used(found, 'reserved'):.0%}",
    ]


def used(found: Record, of: str) -> float:
    """Share of the slots held, or reserved, with a token in them."""
    return found["used"] / found[of] if found[of] else 1.0


def _notes(record: Record, done: Sequence[Record]) -> Iterator[tuple[str, str]]:
    for outcome in record["outcomes"]:
        if outcome["refused"]:
            yield f"{outcome['strategy']} refused: {outcome['refused']}", "yellow"
    yield MEANINGS, ""
    if len(done) > 1:
        first, last = done[0], done[-1]
        times = used(last["figures"], "reserved") / used(first["figures"], "reserved")
        more = f"{last['strategy']} fills {times:.1f} times as much as {first['strategy']}"
        yield f"of the cache it reserves {more}", ""
    if slack := [outcome["strategy"] for outcome in done if outcome["figures"]["busy"] < IDLE_MACHINE]:
        less = "computed less than half of the time, so tokens/s is the trace's more than the machine's"
        yield f"{', '.join(slack)}: {less}: a higher rate shows what it can do", "yellow"
    for proof in record["proofs"]:
        ties = f", {proof['ties']} part at a tie" if proof["ties"] else ""
        text = f"{proof['strategy']} wrote what {proof['against']} wrote: "
        text += f"{proof['alike']} of {proof['requests']}{ties}"
        if not proof["holds"]:
            gap = "one is longer" if proof["gap"] is None else f"by {proof['gap']:.2g} of the largest logit"
            text += f", {proof['differing']} differ ({gap})"
        yield f"{text} (float32)", "" if proof["holds"] else "red"
    if record["unproven"]:
        yield f"answers not compared: {record['unproven']}", "yellow"


def _latencies(done: Sequence[Record]) -> Figure:
    """The share of requests answered in a time or less."""
    series = []
    for place, outcome in enumerate(done):
        latencies = sorted(served["done"] - served["arrival"] for served in outcome["requests"])
        points = [Point(x, 100 * (index + 1) / len(latencies)) for index, x in enumerate(latencies)]
        series.append(Series(outcome["strategy"], tuple(points), place, joined=True))
    return Figure(
        key="latency",
        title="Requests answered",
        caption="The share of requests that were answered within a time after they came.",
        x=Axis("seconds after arrival"),
        y=Axis("% of requests"),
        series=tuple(series),
    )
