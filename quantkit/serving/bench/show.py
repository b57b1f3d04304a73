"""The report of a benchmark: size, loss and speed of each checkpoint, as a table, a page and plots."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quantkit.errors import count, name_all
from quantkit.evaluation.comparison.columns import NOTHING, Columns, at, number
from quantkit.evaluation.comparison.figures import Axis, Figure, Line, Point, Series
from quantkit.evaluation.comparison.report import Report, Table
from quantkit.tables import MODEL_BITS, figure, megabytes, size

Record = dict[str, Any]
Groups = Iterable[tuple[str, Iterable[tuple[str, Record]]]]  # heading, and labels with their records
NOISY = 0.1  # relative median deviation above which a note warns
DECODE = "new tokens per second, all sequences together"


def milliseconds(seconds: float) -> str:
    """Return the time in milliseconds, with three significant digits."""
    return figure(1000 * seconds)


def engine(model: Record) -> str:
    """Return a name for the engine's kernels: `llama.cpp`, `transformers`, `bitsandbytes` or `decoded`."""
    used = model["engine"]
    if used["name"] != "transformers":
        return used["name"]
    if used["packed"]:
        return used["kernels"].partition(" ")[0]
    return "decoded" if used["note"] else used["name"]


def half_range(values: Sequence[float]) -> str:
    """Return half the range of the values as a share of their median; a dash for a single value."""
    half = (max(values) - min(values)) / 2
    return f"{half / statistics.median(values):.0%}" if len(values) > 1 else NOTHING


def table(
    name: str, columns: Columns, groups: Groups, units: Mapping[str, str], explained: bool = False
) -> Table:
    """Return a table of records. name: header of the labels. units, explained: see `Table`."""
    meanings = {header: meaning for header, (meaning, _) in columns.items()}
    rows = [
        (heading, [[label, *(cell(record) for _, cell in columns.values())] for label, record in group])
        for heading, group in groups
    ]
    return Table([name, *columns], rows, meanings, units, explained)


COLUMNS: Columns = {  # for a model's record that is merged with a point's
    "engine": ("kernels that multiply by the weights; decoded: quantkit decoded the weights first", engine),
    "size": ("bytes of all tensors, as stored", at("size.weight_bytes", megabytes)),
    MODEL_BITS: ("per weight over the whole model", at("size.bits_per_weight", "{:.2f}".format)),
    "KL div.": ("KL divergence from the first model of --quality", at("quality.kld", number)),
    "ppl": ("perplexity of --quality", at("quality.perplexity", "{:.2f}".format)),
    "decode/s": ("new tokens a second after the first, all sequences", at("decode.median", figure)),
    "ratio": ("decode/s as a multiple of the first model's, in this run", at("ratio", "{:.2f}×".format)),
    "±": ("median deviation of decode/s between runs", at("decode.mad", "{:.0%}".format)),
    "prefill/s": ("prompt tokens a second, all sequences", at("prefill.median", figure)),
    "first ms": ("milliseconds to every sequence's first token", at("first_token.median", milliseconds)),
    "token ms": ("milliseconds from a sequence's token to its next", at("latency.median", milliseconds)),
    "p90": ("90th percentile of token ms", at("latency.p90", milliseconds)),
    "KV": ("bytes of keys and values at the end of a run", at("kv_bytes", size)),
    "peak": ("peak memory of a run; the notes say how it is measured", at("peak_bytes", size)),
}
UNITS = {"KL div.": "nats/token", "decode/s": "tokens", "prefill/s": "tokens", "p90": "ms"}


def report(record: Record, quiet: bool = False) -> Report:
    """Return the report: a table, notes and plots. quiet: leave out the notes on how it was measured."""
    models, given = record["models"], record["settings"]
    absent = set() if record["quality"] else {"KL div.", "ppl"}
    absent |= set() if len(models) > 1 else {"ratio"}
    absent |= set() if given["rounds"] * given["repeats"] > 1 else {"±"}
    columns = {name: column for name, column in COLUMNS.items() if name not in absent}
    groups = []
    for index, point in enumerate(models[0]["points"]):
        records = [(model["label"], model | model["points"][index]) for model in models]
        groups.append((called(point) if len(models[0]["points"]) > 1 else "", records))
    labels = [model["label"] for model in models]
    notes = [(f"not run: {line}", "yellow") for line in failures(record)]
    notes += [(f"noisy: {line}", "yellow") for line in noise(record)]
    notes += [(line, "") for line in best_batches(record)]
    notes += [] if quiet else [(line, "dim") for line in protocol(record)]
    drawn = [by_batch(record, prompt) for prompt in given["prompt"]] if len(given["batch"]) > 1 else []
    drawn += [against(record)] if len(models) > 1 else []
    return Report(
        title=f"Speed and memory of {', '.join(labels) if len(labels) < 4 else f'{len(labels)} models'}",
        tables=[table("model", columns, groups, UNITS)],
        notes=notes,
        figures=[made for made in drawn if made.series],
        more={"Environment": record["env"]},
    )


def called(point: Record) -> str:
    """Return batch size and prompt length, such as `4 × 128 tokens`."""
    return f"{point['batch']} × {point['prompt']} tokens"


# ---- lines below the table


def protocol(record: Record) -> Iterator[str]:
    """Yield the notes below the table: how all models were measured, then the conditions of each."""
    given = record["settings"]
    runs = count(given["rounds"], "round") + f" of {count(given['repeats'], 'run')}"
    medians = "; medians, ± is the median deviation" if given["rounds"] * given["repeats"] > 1 else ""
    yield (
        f"prompts of random tokens (seed {given['seed']}), {given['tokens']} new tokens each, greedy, end of "
        f"text ignored; {runs} after {given['warmup']} to warm up, models in turn, "
        f"{count(given['threads'], 'thread')}{medians}"
    )
    for model in record["models"]:
        if loaded := model["load"]:
            used = model["engine"]
            packed = "packed" if used["packed"] else "decoded" if used["note"] else "dense"
            attention = f", {used['attention']} attention" if used["attention"] else ""
            yield (
                f"{model['label']}: {used['name']} {used['version']}, {used['kernels']}, {packed}, "
                f"{used['dtype']}{attention}, {size(used['weight_bytes'])} in memory, loaded in "
                f"{loaded['seconds']:.1f} s; peak: {loaded['memory']}"
                + (f" ({used['note']})" if used["note"] else "")
            )
    if quality := record["quality"]:
        yield (
            f"KL divergence and perplexity: {quality['text']}, {quality['tokens']} tokens, context "
            f"{quality['ctx']}, against {quality['reference']}"
        )
        if absent := [model["label"] for model in record["models"] if not model["quality"]]:
            yield f"--quality has no model of this name and size: {name_all(absent)}"


def noise(record: Record) -> list[str]:
    """Return a warning that names the models whose runs differ by more than NOISY; [] if there are none."""
    noisy = []
    for model in record["models"]:
        worst = max((point["decode"]["mad"] for point in model["points"] if point["decode"]), default=0)
        noisy += [f"{model['label']} (± {100 * worst:.0f} %)"] if worst > NOISY else []
    return [f"runs of {name_all(noisy)} differ: stop other programs, or add --repeats"] if noisy else []


def failures(record: Record) -> list[str]:
    """Return a line for each model and reason for which points did not run, with these points."""
    failed: dict[tuple[str, str], list[str]] = {}
    for model in record["models"]:
        for point in model["points"]:
            if point["error"]:
                failed.setdefault((model["label"], point["error"]), []).append(called(point))
    total = len(record["models"][0]["points"])
    return [
        f"{label}{'' if len(points) == total else ', ' + ', '.join(points)}: {why}"
        for (label, why), points in failed.items()
    ]


def best_batches(record: Record) -> Iterator[str]:
    """Yield a line with b*, the batch from which more sequences cost time, per model and prompt length."""
    for model in record["models"] if len(record["settings"]["batch"]) > 1 else ():
        for fitted in model["fits"]:
            step = f"{milliseconds(fitted['floor'])} ms + {milliseconds(fitted['slope'])} ms·b"
            best = f"{figure(fitted['optimal_batch'])} (a step takes {step})"
            yield f"b* of {model['label']}, {fitted['prompt']} tokens: {best}"
        if not model["fits"] and not model["error"]:
            yield f"b* of {model['label']}: not known (needs three batches that take longer as they grow)"


# ---- plots


def _ran(model: Record, **at: int) -> Iterator[Record]:
    """Yield the points that ran and whose fields have the values `at`."""
    for point in model["points"]:
        if point["error"] is None and all(point[key] == value for key, value in at.items()):
            yield point


def by_batch(record: Record, prompt: int) -> Figure:
    """Return a plot of measured throughput over batch size, for one prompt length."""
    batches = record["settings"]["batch"]
    series, lines = [], []
    for index, model in enumerate(record["models"]):
        points = []
        for point in _ran(model, prompt=prompt):
            speed = point["decode"]
            note = f"{model['label']}, {called(point)}: {figure(speed['median'])} tokens/s"
            points.append(Point(point["batch"], speed["median"], speed["min"], speed["max"], note))
        series += [Series(model["label"], tuple(points), index, joined=True)] if points else []
        best = [fitted["optimal_batch"] for fitted in model["fits"] if fitted["prompt"] == prompt]
        if len(record["models"]) == 1 and best and batches[0] <= best[0] <= batches[-1]:
            lines.append(Line(f"b* {figure(best[0])}", "x", best[0]))
    knee = " b*: the batch from which more sequences cost time." if lines else ""
    return Figure(
        key=f"batch-{prompt}",
        title=f"Throughput by batch, {prompt} prompt tokens",
        caption="Marks: the median of all runs." + knee,
        bars="Bars: slowest and fastest run.",
        x=Axis("sequences at once", "whole", log=True, ticks=tuple(batches)),
        y=Axis(DECODE, log=True),
        series=tuple(series),
        lines=tuple(lines),
    )


def against(record: Record) -> Figure:
    """Return a plot of KL divergence (if unknown: size) against decoding speed at the first point."""
    by_loss = any(model["quality"] and model["quality"]["kld"] for model in record["models"])
    first = record["models"][0]["points"][0]
    series = []
    equal = [m["label"] for m in record["models"] if by_loss and m["quality"] and not m["quality"]["kld"]]
    zero = f" Not drawn: {name_all(equal)} (KL divergence 0)." if equal else ""
    for index, model in enumerate(record["models"]):
        loss = (model["quality"] or {}).get("kld") if by_loss else model["size"]["weight_bytes"]
        for point in _ran(model, batch=first["batch"], prompt=first["prompt"]) if loss else ():
            speed = point["decode"]["median"]
            note = f"{model['label']}: {figure(speed)} tokens/s, {megabytes(model['size']['weight_bytes'])}"
            series.append(Series(model["label"], (Point(speed, loss, note=note),), index, joined=False))
    return Figure(
        key="quality" if by_loss else "size",
        title="Quality against speed" if by_loss else "Size against speed",
        caption=f"Batch {first['batch']}, {first['prompt']} prompt tokens. Best: lower right.{zero}",
        x=Axis(DECODE, log=True),
        y=Axis("KL divergence, nats per token", log=True)
        if by_loss
        else Axis("size of all tensors", "bytes"),
        series=tuple(series),
    )
