"""Prints the plan or the result of `quantkit auto`."""

import re
from typing import Any

from rich.console import Console

from quantkit.capacity.show import duration
from quantkit.errors import count
from quantkit.inspection import names
from quantkit.tables import make_table, megabytes, print_facts, print_refused, print_table, ranges

MEASURED = {  # rows of the table that compares the searched model with a uniform one
    "size": lambda result: megabytes(result["output_bytes"]),
    "size of files": lambda result: megabytes(result["disk_bytes"]),
    "bits/weight": lambda result: f"{result['bits_per_weight']:.2f}",
    "measured KL divergence": lambda result: f"{result['kld']:.5f} ± {result['kld_stderr']:.5f}",
    "perplexity": lambda result: f"{result['ppl']:.2f}",
}

LLAMA_CPP = "--engine llama.cpp searches such files, embedding and output matrix included"


def print_record(record: dict[str, Any]) -> None:
    """Print the result of a search, its plan in a dry run, or that it was finished before `--resume`."""
    if "finished" in record:
        return print(f"{record['output']} is already finished")
    console = Console(highlight=False, markup=False)
    _print_rooms(console, record["rooms"])
    if "searched" not in record:
        return _print_plan(console, record)
    _print_choice(console, record["choice"])
    uniform, gguf = record["uniform"], record["gguf"]
    columns = {name: record[name] for name in ("searched", "uniform") if record[name]}
    table = make_table("", *columns)
    for name, cell in MEASURED.items():
        table.add_row(name, *map(cell, columns.values()))
    if record["searched"] != uniform:  # the uniform one sets the scale of predictions
        table.add_row("predicted KL divergence", f"{record['searched']['predicted_kld']:.5f}")
    print_table(console, table)
    text = record["measured_on"]
    facts = {"measured on": f"{text['tokens']} tokens, {text['text']}; predicted on others"}
    if uniform:
        facts["uniform"] = f"{uniform['name']}, the best preset that fits"
    facts |= {"kept": _verdict(record), "written": record["output"]}
    if gguf:
        difference, size = _difference(gguf, record[record["kept"]]), megabytes(gguf["disk_bytes"])
        facts["as GGUF"] = f"{gguf['name']}, {size}: {difference}; {LLAMA_CPP}"
    if record["cache"]:
        shape = f"--ctx {record['rooms'][0]['ctx']} --parallel {record['budget']['batch']}"
        only_one = record["engine"] == "transformers"  # its cache has the type of the model
        facts["serve with"] = shape if only_one else f"--kv-dtype {record['cache']} {shape}"
    if not record["reached"]:
        facts["missed"] = f"a divergence of {record['budget']['max_kld']:g} was not reached"
    search = f"measuring sensitivities took {record['sensitivities_seconds']:.1f}"
    earlier = ", in an earlier run" if record["sensitivities_read"] else ""
    print_facts(console, facts | {"seconds": f"{record['seconds']:.1f} ({search}{earlier})"})


def _print_plan(console: Console, record: dict[str, Any]) -> None:
    budget = next(f"{name} {value}" for name, value in record["budget"].items() if value is not None)
    needs = record["needs"]
    chosen = f"{count(record['units'], 'unit')}, {record['candidates']:,} candidates in all"
    name, host = record["device"], needs["host_bytes"] + needs["python_bytes"]
    device = "" if name == "cpu" else f", and {megabytes(needs['memory_bytes'])} on {name}"
    print_refused(console, record["refused"])
    print_facts(
        console,
        {
            "output": record["output"],
            "engine": record["engine"],
            "budget": budget.replace("_", "-"),
            "chosen": f"{chosen}: {record['least_bits']:.2f} to {record['most_bits']:.2f} bits per weight",
            "presets": ", ".join(f"{name} {bits:.2f}" for name, bits in record["presets"].items()),
            "search": f"each unit is measured on {record['search_tokens']:,} tokens; "
            f"{record['statistics_tokens']:,} other tokens calibrate",
            "time": _time(record["expected_seconds"]),
            "measured on": f"{record['measured_on']['tokens']} tokens, {record['measured_on']['text']}",
            "memory": (
                f"about {megabytes(host)} on the CPU, "
                f"{megabytes(needs['python_bytes'])} of it Python and tokenizer{device}"
            ),
            "disk": f"{megabytes(needs['disk_bytes'])} while it runs",
        },
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown: only jobs of one process on a CPU with default options were measured"
    return f"about {duration(seconds)}, by a benchmark of this machine"


def _print_rooms(console: Console, rooms: list[dict[str, Any]]) -> None:
    """Print how many bits fit with each type of the KV cache and with half of the context."""
    table = make_table("KV cache", "tokens", "bits/weight", "KL of weights", "KL of cache")
    for room in rooms:
        lost = (f"{room[name]:.5f}" if name in room else "–" for name in ("predicted_kld", "cache_kld"))
        table.add_row(room["cache"], f"{room['ctx']:,}", f"{room['bits']:.2f}", *lost)
    if rooms:
        print_table(console, table)


def _print_choice(console: Console, choice: dict[str, str]) -> None:
    """Print {unit: candidate}; units of the same name and candidate in several blocks share a row."""
    equal: dict[str, dict[str, list[int]]] = {}
    for unit, candidate in choice.items():
        _, block, name = names.split(unit)
        blocks = equal.setdefault(name, {}).setdefault(candidate, [])
        blocks += [] if block is None else [block]
    table = make_table("linears", "blocks", "stored as")
    for name, candidates in equal.items():
        for candidate, blocks in sorted(candidates.items()):
            stored = re.sub(r"^(\d+),(\d+)$", r"\1 bit g\2", candidate)
            table.add_row(name, ranges(sorted(blocks)), stored)
    print_table(console, table, 1)


def _difference(result: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a phrase that compares the divergence of a result with another's."""
    less = 1 - result["kld"] / max(other["kld"], 1e-30)
    return f"{abs(less):.0%} {'less' if less > 0 else 'more'} KL divergence"


def _verdict(record: dict[str, Any]) -> str:
    searched, uniform = record["searched"], record["uniform"]
    if uniform is None:
        return "searched; no uniform preset is as small"
    if searched == uniform:
        return f"{uniform['name']}: the search found nothing better"
    difference = _difference(searched, uniform)
    if record["kept"] == "searched":
        return f"the searched model: {difference} than {uniform['name']}"
    return f"{uniform['name']}: the searched model has {difference}"
