"""Prints a search."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from quantkit.capacity.show import duration
from quantkit.errors import count
from quantkit.tables import make_table, megabytes, print_facts, ranges


def print_record(record: dict[str, Any]) -> None:
    """Print the result of a search, or its plan in a dry run."""
    console = Console(highlight=False, markup=False)
    _print_rooms(console, record["rooms"])
    if "searched" not in record:
        return _print_plan(console, record)
    _print_choice(console, record["choice"])
    searched, uniform = record["searched"], record["uniform"]
    table = make_table("", "size", "files", "bits/weight", "KL predicted", "measured", "perplexity")
    for name, row in (("searched", searched), ("uniform", uniform)):
        if row:
            table.add_row(
                name,
                megabytes(row["output_bytes"]),
                megabytes(row["disk_bytes"]),
                f"{row['bits_per_weight']:.2f}",
                f"{row['predicted_kld']:.5f}",
                f"{row['kld']:.5f} ± {row['kld_stderr']:.5f}",
                f"{row['ppl']:.2f}",
            )
    console.print(table)
    text = record["measured_on"]
    facts = {"measured on": f"{text['tokens']} tokens, {text['text']}; predicted on others"}
    if uniform:
        facts["uniform"] = f"{uniform['name']}, the best preset that fits"
    facts |= {"kept": _verdict(record), "written": record["output"]}
    if record["cache"]:
        shape = f"--ctx {record['rooms'][0]['ctx']} --parallel {record['budget']['batch']}"
        facts["serve with"] = f"--kv-dtype {record['cache']} {shape}"
    if not record["reached"]:
        facts["missed"] = f"a divergence of {record['budget']['max_kld']:g} was not reached"
    search = f"measuring sensitivities took {record['sensitivities_seconds']:.1f}"
    print_facts(console, facts | {"seconds": f"{record['seconds']:.1f} ({search})"})


def _print_plan(console: Console, record: dict[str, Any]) -> None:
    budget = next(f"{name} {value}" for name, value in record["budget"].items() if value is not None)
    needs = record["needs"]
    chosen = f"{count(record['units'], 'unit')}, {record['candidates']:,} candidates in all"
    print_facts(
        console,
        {
            "output": record["output"],
            "engine": record["engine"],
            "budget": budget.replace("_", "-"),
            "chosen": f"{chosen}: {record['least_bits']:.2f} to {record['most_bits']:.2f} bits per weight",
            "presets": ", ".join(f"{name} {bits:.2f}" for name, bits in record["presets"].items()),
            "search": f"{record['streams']} streams of {record['search_tokens']:,} tokens, solved by "
            f"{record['statistics_tokens']:,} others",
            "time": _time(record["expected_seconds"]),
            "measured on": f"{record['measured_on']['tokens']} tokens, {record['measured_on']['text']}",
            "memory": f"about {megabytes(needs['memory_bytes'])} on {record['device']}, "
            f"{megabytes(needs['host_bytes'])} on the host",
            "disk": f"{megabytes(needs['disk_bytes'])} while it runs",
        },
    )


def _time(seconds: tuple[float, float] | None) -> str:
    if seconds is None:
        return "unknown: nothing was measured on an accelerator"
    return f"{duration(seconds[0])} to {duration(seconds[1])}, from operations at 20 to 80 GFLOPS a core"


def _print_rooms(console: Console, rooms: list[dict[str, Any]]) -> None:
    """Print how many bits fit with each type of the KV cache and with half of the context."""
    table = make_table("KV cache", "tokens", "bits/weight", "KL of weights", "KL of cache")
    for row in rooms:
        lost = (f"{row[name]:.5f}" if name in row else "–" for name in ("predicted_kld", "cache_kld"))
        table.add_row(row["cache"], f"{row['ctx']:,}", f"{row['bits']:.2f}", *lost)
    if rooms:
        console.print(table)


def _print_choice(console: Console, choice: dict[str, str]) -> None:
    """Print {unit: candidate}, with one row for units of the same name in several blocks."""
    equal: dict[str, dict[str, list[int]]] = {}
    for name, candidate in choice.items():
        number = re.search(r"\.(\d+)\.", name)
        kind = re.sub(r"^.*?\.\d+\.", "", name) if number else name
        equal.setdefault(kind, {}).setdefault(candidate, []).append(int(number[1]) if number else -1)
    table = make_table("linear", "stored as, by block")
    words = table.columns[1]
    words.justify, words.no_wrap = "left", False
    for kind, found in equal.items():
        blocks = ((one, sorted(numbers)) for one, numbers in sorted(found.items()))
        parts = (one if numbers == [-1] else f"{one} {ranges(numbers)}" for one, numbers in blocks)
        table.add_row(kind, "; ".join(parts))
    console.print(table)


def _verdict(record: dict[str, Any]) -> str:
    searched, uniform = record["searched"], record["uniform"]
    if uniform is None:
        return "searched; no uniform preset is as small"
    less = 1 - searched["kld"] / max(uniform["kld"], 1e-30)
    if record["kept"] == "searched":
        return f"the searched model: {less:.0%} less KL divergence than {uniform['name']}"
    return f"{uniform['name']}: the searched model has {abs(less):.0%} more KL divergence"
