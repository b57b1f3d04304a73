"""The report of batching measurements."""

import statistics
from collections.abc import Iterator, Sequence

from quantkit.evaluation.comparison.columns import Columns, at
from quantkit.evaluation.comparison.figures import Axis, Figure, Point, Series
from quantkit.evaluation.comparison.report import Report
from quantkit.serving.bench.show import Record, half_range, table
from quantkit.tables import figure

IDLE_MACHINE = 0.5  # below this share of busy time, the trace mostly measures waiting
COLUMNS: Columns = {  # for a strategy's outcome
    "tok/s": ("new tokens a second", at("figures.tokens_per_second", figure)),
    "±": ("half the range of the rounds", lambda outcome: half_range(outcome["tokens_per_second"])),
    "ratio": ("tok/s over the first row's", at("ratio", "{:.2f}×".format)),
    "p50": ("seconds from arrival to the answer, median", at("figures.latency.p50", figure)),
    "p90": ("90th percentile", at("figures.latency.p90", figure)),
    "p99": ("99th percentile", at("figures.latency.p99", figure)),
    "1st p50": ("seconds from arrival to the first token, median", at("figures.first_token.p50", figure)),
    "1st p99": ("99th percentile", at("figures.first_token.p99", figure)),
    "padded": ("share of padding in the prompts", at("figures.padded", "{:.1%}".format)),
    "idle": ("share of finished sequences in decoding", at("figures.idle", "{:.1%}".format)),
    "KV used": ("tokens in the cache, averaged over the computed time", at("figures.used", "{:,.0f}".format)),
    "reserved": ("slots of the cache reserved for tokens", at("figures.reserved", "{:,.0f}".format)),
}
UNITS = dict.fromkeys(("p50", "p90", "p99", "1st p50", "1st p99"), "s")
UNITS |= dict.fromkeys(("KV used", "reserved"), "tokens")


def report(record: Record) -> Report:
    """Return the report: conditions, a table of speed, latency and waste, and a plot of latencies."""
    settings = record["settings"]
    setup = f"{record['dtype']} on {record['device']}, {settings['batch'][0]} sequences at once"
    ran = [outcome for outcome in record["outcomes"] if outcome["figures"]]
    medians = f"the median of {settings['repeats']} rounds after a warm-up, ± half their range"
    medians = medians if settings["repeats"] > 1 else "one round after a warm-up"
    rows = [(outcome["strategy"], outcome) for outcome in ran]
    return Report(
        title=f"Speed and latency of batching with {record['model']}",
        facts={
            "model": f"{record['model']}, {record['weights']}, {record['attention']} attention",
            "trace": f"{describe(record['trace'])}; Poisson arrivals at {settings['rate']:g}/s",
            "measured": f"{setup}; {medians}; waiting by a virtual clock",
        },
        tables=[table("batching", COLUMNS, [("", rows)], UNITS, explained=True)],
        notes=list(_notes(record, ran)),
        figures=[_latencies(ran)],
    )


def describe(requests: Sequence[Record]) -> str:
    """Return `32 requests in 3.9 s; prompts 4 to 121 tokens (median 40), outputs …`."""
    lengths = []
    for name in ("prompt", "output"):
        counts = [request[name] for request in requests]
        median = statistics.median(counts)
        lengths.append(f"{name}s {min(counts)} to {max(counts)} tokens (median {median:g})")
    seconds = requests[-1]["arrival"] - requests[0]["arrival"]
    return f"{len(requests)} requests in {seconds:.3g} s; {', '.join(lengths)}"


def _notes(record: Record, ran: Sequence[Record]) -> Iterator[tuple[str, str]]:
    for outcome in record["outcomes"]:
        if outcome["refused"]:
            yield f"{outcome['strategy']} refused: {outcome['refused']}", "yellow"
    if idle := [outcome["strategy"] for outcome in ran if outcome["figures"]["busy"] < IDLE_MACHINE]:
        less = "computed less than half of the time: a higher --rate shows the machine's own tokens/s"
        yield f"{', '.join(idle)} {less}", "yellow"


def _latencies(ran: Sequence[Record]) -> Figure:
    """Return a plot of the share of requests answered within a time."""
    series = []
    for colour, outcome in enumerate(ran):
        latencies = sorted(served["done"] - served["arrival"] for served in outcome["requests"])
        points = [Point(x, 100 * (index + 1) / len(latencies)) for index, x in enumerate(latencies)]
        series.append(Series(outcome["strategy"], tuple(points), colour, joined=True))
    return Figure(
        key="latency",
        title="Answered requests",
        caption="Share of the requests that are answered within so many seconds after their arrival.",
        x=Axis("seconds after arrival"),
        y=Axis("answered requests, %"),
        series=tuple(series),
    )
