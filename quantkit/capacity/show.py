"""Prints a forecast: the model, the sizes of all formats, and the jobs that make them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.table import Table

from quantkit.capacity.formats import STORED
from quantkit.capacity.job import typed
from quantkit.tables import (
    MODEL_BITS,
    make_console,
    make_table,
    megabytes,
    print_facts,
    print_line,
    print_table,
    size,
)

METHODS = ("fp8", "w8a8", "int8", "nf4", "fp4", "fp4a4", "gptq", "awq")
SHOWN = ("bf16", *METHODS, "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
MISSING = "–"
Record = dict[str, Any]


def show(record: Record, quiet: bool = False, one_format: bool = False) -> None:
    """Print a record of forecast.py. quiet: omit explanations, but not warnings. one_format: show only the
    format of the record's `method`."""
    console = make_console()
    formats = (record["method"],) if one_format else SHOWN
    print_facts(console, _about(record))
    print_table(console, _weights(record, formats))
    print_facts(console, _cache(record))
    if record["job"]:
        print_table(console, _jobs(record))
    for line in () if quiet else _remarks(record, formats):
        print_line(console, line, "dim")
    for note in record["notes"]:
        print_line(console, f"note: {note}")


def count(number: float) -> str:
    """Return a number such as `13.02 billion`."""
    for limit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.2f} {word}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Return a time such as `40 s`, `12 min`, `3.5 h` or `13.1 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def _about(record: Record) -> dict[str, str]:
    parameters, shape, device = record["parameters"], record["architecture"], record["device"]
    facts = {"model": record["model"]} if record["model"] else {}
    certain = "exact, from" if parameters["exact"] else "estimate from"
    facts["parameters"] = f"{count(parameters['count'])} ({certain} {parameters['basis']})"
    if parameters["active"] not in (parameters["count"], None):
        facts["parameters"] += f", {count(parameters['active'])} of them active"
    if parameters["quantized"]:
        facts["parameters"] += f", stored in {megabytes(parameters['stored_bytes'])}"
    if shape:
        facts["shape"] = f"{shape['model_type']}, {shape['layers']} layers × {shape['hidden']:,}"
        if shape["heads"]:
            pairs = f", {shape['kv_heads']} KV heads" if shape["kv_heads"] else ""
            kind = f" ({shape['attention']})" if shape["attention"] else ""
            facts["shape"] += f", {shape['heads']} heads{pairs}{kind}"
    if device:
        numbers = [size(device["memory_bytes"])] if device["memory_bytes"] else []
        numbers += [f"{device['bandwidth'] / 1e9:,.0f} GB/s"] if device["bandwidth"] else []
        numbers += [f"{device['flops'] / 1e12:,.3g} TFLOPS"] if device["flops"] else []
        fewer = device["flops_of_fewer_bits"].items()
        numbers += [f"{flops / 1e12:,.0f} in {name}" for name, flops in fewer]
        if device["usable_bytes"]:
            numbers[0] += f" ({size(device['usable_bytes'])} of it used)"
        facts["device"] = f"{device['name']}, {', '.join(numbers)}"
    return facts


def _weights(record: Record, formats: Iterable[str]) -> Table:
    """Return a table with one row per format; fit and speed are columns only if a device is given."""
    device = record["device"] or {}
    columns: dict[str, Callable[[Record], str]] = {
        "size": lambda row: megabytes(row["bytes"]),
        MODEL_BITS: lambda row: f"{row['bits_per_weight']:.2f}",
    }
    if device.get("memory_bytes"):
        columns["fits"] = lambda row: "yes" if row["fits"] else "no"
        columns["requests"] = lambda row: _known("{:,}", row["requests_that_fit"])
    if device.get("bandwidth"):
        columns["tokens/s"] = lambda row: _known(
            "≤ {:,.0f}", None if row["fits"] is False else row["tokens_per_second"]
        )
    if device.get("bandwidth") and device.get("flops"):
        columns["best batch"] = lambda row: f"{row['optimal_batch']:,.0f}"
    table = make_table("weights", *columns)
    table.collapse_padding = True  # fits 80 columns
    stored = record["weights"].get(STORED)
    if stored and STORED not in formats and stored["bytes"] != record["weights"]["bf16"]["bytes"]:
        table.add_row("as stored", *(cell(stored) for cell in columns.values()))
    for name in formats:
        row = record["weights"][name]
        known = row["bytes"] is not None
        table.add_row(name, *(cell(row) if known else MISSING for cell in columns.values()))
    return table


def _known(form: str, value: float | None) -> str:
    return MISSING if value is None else form.format(value)


def _cache(record: Record) -> dict[str, str]:
    cache = record["kv_cache"]
    if cache["bytes_per_sequence"] is None:
        word = "unsupported" if record["architecture"] else "unknown"
        return {"KV cache": f"{word}: {cache['unsupported']}"}
    each = size(cache["bytes_per_sequence"])
    facts = {"KV cache": f"{each} per sequence of {cache['tokens']:,} tokens ({cache['dtype']})"}
    if cache["batch"] > 1:
        facts["KV cache"] += f", {size(cache['bytes'])} for {cache['batch']}"
    kinds = record["architecture"]["layer_types"]
    if set(kinds) != {"full"}:
        windows = record["architecture"]["windows"]
        facts["layers"] = ", ".join(
            f"{number} {kind}{_window(windows.get(kind))}" for kind, number in kinds.items()
        )
    return facts


def _window(tokens: list[int] | None) -> str:
    """Return ` (4,096 tokens)` for a window, or "" without one."""
    return f" ({' or '.join(f'{each:,}' for each in tokens)} tokens)" if tokens else ""


def _jobs(record: Record) -> Table:
    table = make_table("to make it", "peak memory", "disk", "time")
    table.collapse_padding = True  # as in the table of weights
    for method, job in record["job"].items():
        if job["peak_memory_bytes"] is None:
            table.add_row(method, *[MISSING] * 3)
            continue
        time = f"about {duration(job['seconds'])}" if job["seconds"] else "unknown"
        memory = size(job["peak_memory_bytes"]) + (", too much" if job["fits"] is False else "")
        table.add_row(method, memory, megabytes(job["disk_bytes"]), time)
    return table


def _remarks(record: Record, formats: Iterable[str]) -> Iterator[str]:
    """Yield the lines below the tables: reasons for refusals, and where the times come from."""
    remarks: dict[str, list[str]] = {}
    for name in formats:
        row = record["weights"][name]
        if row["bytes"] is None:
            remarks.setdefault(f"not possible: {row['reason']}", []).append(name)
    for method, job in record["job"].items():
        if job["peak_memory_bytes"] is not None:
            within = f" within a factor of {job['seconds_factor']}, from" if job["seconds"] else ""
            remarks.setdefault(f"time{within} {job['basis']}", []).append(method)
            if memory := _memory_basis(job):
                remarks.setdefault(memory, []).append(method)
            if job["needs"]:
                why = "the errors of both quantizations add up"
                remarks.setdefault(f"only with {job['needs']}: {why}", []).append(method)
        elif f"not possible: {job['reason']}" not in remarks:
            remarks.setdefault(f"refused: {job['reason']}", []).append(method)
    made = [job for job in record["job"].values() if job["peak_memory_bytes"] is not None]
    if made:
        yield f"to make it: on {made[0]['device']} in {made[0]['dtype']}"
    for remark, names in remarks.items():
        yield f"{', '.join(names)}: {remark}"
    if not record["device"]:
        here = "; quantkit bench measures the speed here" if record["model"] else ""
        yield f"add --gpu NAME for fit and speed{here}"
    elif record["kv_cache"]["bytes_per_sequence"] is not None:
        yield (
            "fits: weights and the cache of all sequences; requests: most sequences at the same time; "
            "tokens/s: upper bound for one sequence; best batch: larger batches are compute-bound (for the "
            "linears)"
        )


def _memory_basis(job: Record) -> str | None:
    """Return how a job uses less memory than usual, or with which options it would fit; None if it fits."""
    if job["fits"] is False:
        if (remedy := job["remedy"]) is None:
            return "no option makes it fit"
        return f"{size(remedy['peak_memory_bytes'])} with {remedy['flags']}"
    flags = typed({name: job[name] for name in ("sequential", "states")})
    return f"memory with {flags}, which the job chooses" if flags else None
