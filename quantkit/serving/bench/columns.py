"""The columns of a benchmark, on a terminal and on the page: what a checkpoint weighs, loses and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.errors import count, name_all
from quantkit.evaluation.comparison.columns import NOTHING, bits, number
from quantkit.tables import megabytes, size

Record = dict[str, Any]
NOISY = 0.1  # median deviation from which on people are warned


@dataclass(frozen=True)
class Column:
    """cell: of a model's record and of one of its points. ran: only where the point ran."""

    header: str
    meaning: str
    cell: Callable[[Record, Record], str]
    ran: bool = True


@dataclass(frozen=True)
class Row:
    """One model at one point. cells: the label first. error: why its point did not run."""

    source: str
    cells: list[str]
    error: str | None


def figure(value: float | None) -> str:
    """Three digits, or as many as the whole part has."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else figure(1000 * seconds)


def _bytes(value: int | None) -> str:
    return NOTHING if value is None else size(value)


def _ratio(point: Record) -> str:
    ratio = point["ratio"]["decode"]
    return NOTHING if ratio is None else f"{ratio['value']:.2f}×"


def _latency(key: str) -> Callable[[Record, Record], str]:
    return lambda model, point: milliseconds(point["latency"] and point["latency"][key])


def _quality(key: str, write: Callable[[float | None], str]) -> Column:
    headers = {"kld": "KL div.", "perplexity": "ppl"}
    return Column(
        headers[key],
        "KL divergence from the first model of --quality" if key == "kld" else "perplexity of --quality",
        lambda model, point: write(model["quality"] and model["quality"][key]),
        ran=False,
    )


def _perplexity(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


SIZE = (
    Column("size", "of all tensors, as stored", lambda m, p: megabytes(m["size"]["weight_bytes"]), ran=False),
    Column(
        "bits", "per weight, over the whole model", lambda m, p: bits(m["size"]["bits_per_weight"]), ran=False
    ),
)
ENGINE = Column(
    "engine",
    "and whose kernels multiply; decoded: the weights are codes on disk, but not as they run",
    lambda m, p: engine(m["engine"]),
    ran=False,
)
SPEED = (
    Column(
        "decode/s",
        "new tokens a second after the first, of all sequences together (median)",
        lambda m, p: figure(p["decode"]["tokens_per_second"]["median"]),
    ),
    Column("ratio", "decode/s as a multiple of the first model's, in this run", lambda m, p: _ratio(p)),
    Column("±", "median deviation of decode/s between runs", lambda m, p: _spread(p)),
    Column(
        "prefill/s",
        "prompt tokens a second, of all sequences together (median)",
        lambda m, p: figure(p["prefill"]["tokens_per_second"]["median"]),
    ),
    Column(
        "first ms",
        "milliseconds until every sequence has its first token (median)",
        lambda m, p: milliseconds(p["prefill"]["seconds"]["median"]),
    ),
    Column("token ms", "milliseconds from a sequence's token to its next (median)", _latency("median")),
    Column("p90", "milliseconds that nine of ten such steps stay below", _latency("p90")),
)
MEMORY = (
    Column("weights", "as they lie in memory", lambda m, p: _bytes(p["memory"]["weight_bytes"])),
    Column("KV", "keys and values at the end of a run", lambda m, p: _bytes(p["memory"]["kv_bytes"])),
    Column("peak", "of memory in a run: see the foot", lambda m, p: _bytes(p["memory"]["peak_bytes"])),
)


def engine(told: Record) -> str:
    """`llama.cpp`, `transformers`, `bitsandbytes`, `decoded`."""
    if told["name"] != "transformers":
        return told["name"]
    if told["packed"]:
        return told["kernels"].partition(" ")[0]
    return "decoded" if told["note"] else told["name"]


def _spread(point: Record) -> str:
    return f"{100 * point['decode']['tokens_per_second']['mad']:.0f} %"


def columns(record: Record) -> list[Column]:
    """Those there is something to say in: quality where an evaluation was given."""
    quality = (_quality("kld", number), _quality("perplexity", _perplexity)) if record["quality"] else ()
    several = len(record["models"]) > 1
    speed = (column for column in SPEED if several or column.header != "ratio")
    return [ENGINE, *SIZE, *quality, *speed, *MEMORY]


def rows(record: Record) -> Iterator[tuple[Record, list[Row]]]:
    """Every point with a row for each model."""
    shown = columns(record)
    for index, point in enumerate(record["models"][0]["points"] if record["models"] else ()):
        found = []
        for model in record["models"]:
            own = model["points"][index]
            cells = [NOTHING if own["error"] and column.ran else column.cell(model, own) for column in shown]
            found.append(Row(model["source"], [model["label"], *cells], own["error"]))
        yield point, found


def protocol(record: Record) -> list[str]:
    """Under what the figures hold, and what to know of each model: the foot of the table."""
    asked = record["settings"]
    runs = count(asked["rounds"], "round") + f" of {count(asked['repeats'], 'run')}"
    lines = [
        f"prompts of random tokens (seed {asked['seed']}), {asked['tokens']} new tokens each, greedy, end of "
        f"text ignored; {runs} after {asked['warmup']} to warm up, models in turn, "
        f"{count(asked['threads'], 'thread')}; medians, ± is the median deviation"
    ]
    lines += [f"{model['label']}: {_runs_by(model)}" for model in record["models"] if model["load"]]
    lines += _peaks(record)
    if told := record["quality"]:
        lines.append(
            f"KL divergence and perplexity: {told['text']}, {told['tokens']} tokens, context {told['ctx']}, "
            f"against {told['reference']}"
        )
    lines += [note for model in record["models"] if (note := model["quality_note"])]
    return lines


def _peaks(record: Record) -> Iterator[str]:
    """What peaks are of, and of which models where they differ."""
    models: dict[str, list[str]] = {}
    for model in record["models"]:
        if model["load"]:
            models.setdefault(model["load"]["memory"], []).append(model["label"])
    for how, labels in models.items():
        yield f"peak{f' of {name_all(labels)}' if len(models) > 1 else ''}: {how}, the most in any run"


def _runs_by(model: Record) -> str:
    engine = model["engine"]
    how = f"{engine['name']} {engine['version']}, {engine['kernels']}, "
    how += "packed" if engine["packed"] else "decoded" if engine["note"] else "dense"
    how += f", {engine['dtype']}" + (f", {engine['attention']} attention" if engine["attention"] else "")
    loaded = f", loaded in {model['load']['seconds']:.1f} s"
    return how + loaded + (f" ({engine['note']})" if engine["note"] else "")


def noise(record: Record) -> str:
    """Models whose runs differ so much that small differences say nothing; empty where none do."""
    found = []
    for model in record["models"]:
        ran = [point["decode"]["tokens_per_second"] for point in model["points"] if point["decode"]]
        worst = max((told["mad"] for told in ran), default=0)
        if worst > NOISY:
            found.append(f"{model['label']} (± {100 * worst:.0f} %)")
    return f"runs of {name_all(found)} differ: stop other programs, or add --repeats" if found else ""


def called(point: Record) -> str:
    """`4 × 128 tokens`."""
    return f"{point['batch']} × {point['prompt']} tokens"


def failures(record: Record) -> list[str]:
    """Why what did not run did not, each reason once for the models and points that it stopped."""
    found: dict[tuple[str, str], list[str]] = {}
    for point, part in rows(record):
        for row in part:
            if row.error:
                found.setdefault((row.cells[0], row.error), []).append(called(point))
    every = len(record["models"][0]["points"]) if record["models"] else 0
    return [
        f"{label}{'' if len(where) == every else ', ' + ', '.join(where)}: {why}"
        for (label, why), where in found.items()
    ]


def best_batches(record: Record) -> list[str]:
    """b* of each model and prompt length: what the machine would allow, and what was measured."""
    lines = []
    for model in record["models"]:
        for row in model["roofline"]:
            if not row["measured"] and not (row["predicted"] and len(record["settings"]["batches"]) > 1):
                continue
            said = f"b* of {model['label']}, {row['prompt']} tokens:"
            if told := row["predicted"]:
                rates = (
                    f"{told['bandwidth'] / 1e9:,.1f} GB/s, {told['flops'] / 1e9:,.0f} GFLOPS {told['source']}"
                )
                said += f" predicted {figure(told['optimal_batch'])} ({rates}),"
            lines.append(f"{said} measured {_measured(row['measured'])}")
    return lines


def _measured(fitted: Record | None) -> str:
    if fitted is None:
        return "not known (it takes three batches, and that more sequences cost time)"
    shape = {"max": "max({}, {}·b)", "sum": "{} + {}·b"}[fitted["shape"]]
    times = shape.format(f"{milliseconds(fitted['floor'])} ms", f"{milliseconds(fitted['slope'])} ms")
    outside = {"within": "", "below": "below all batches, about ", "beyond": "beyond all batches, about "}
    best = outside[fitted["where"]] + figure(fitted["optimal_batch"])
    return f"{best} (a step takes {times}, within {100 * fitted['error']:.0f} %)"
