"""What `quantkit distill TEACHER --blocks N` prints."""

from __future__ import annotations

from rich.console import Console

from quantkit.evaluation.comparison.table import print_comparison
from quantkit.tables import megabytes, print_facts


def print_record(record: dict) -> None:
    """What was done or, without `published`, would be."""
    console, done = Console(highlight=False, markup=False), "published" in record
    big, small, how, schedule = record["teacher"], record["student"], record["execution"], record["schedule"]
    share = f"{small['parameters']:,} of {big['parameters']:,} parameters"
    size = f", {megabytes(small['bytes'])} of {megabytes(big['bytes'])}" if done else ""
    depth = f"{small['blocks']} of {big['blocks']} blocks"
    width = f", {small['width']} of {big['width']} channels in each MLP" if small["width"] else ""
    tokens = schedule["batch"] * record["calibration"]["seqlen"]
    facts = {"written" if done else "output": small["output"], "student": f"{depth}{width}; {share}{size}"}
    if done and record["chosen"]["rounds"]:
        facts["left out"] = left_out(record["chosen"], big["blocks"])
    facts["text"] = text(record)
    facts["training"] = f"{schedule['steps']:,} steps of {schedule['batch']} sequences, {tokens:,} tokens"
    facts["runs"] = f"{how['dtype']}, {how['threads']} threads, on {how['device']}"
    facts["memory"] = f"about {megabytes(record['memory_bytes'])}; disk {megabytes(record['disk_bytes'])}"
    if done:
        published = record["published"] == "trained"
        best = record["trained"]["best"]["step"]
        facts["published"] = (
            f"as trained, after {best:,} steps" if published else "as cut: training did not help"
        )
        del facts["memory"]
        facts["seconds"] = ", ".join(f"{name} {value:.0f}" for name, value in record["seconds"].items())
    print_facts(console, facts)
    for measured in filter(None, (record.get("held_out"), record.get("eval"))):
        console.print()
        print_comparison(measured)


def left_out(chosen: dict, depth: int) -> str:
    """`block 3 (KL divergence without it 0.202), then 1 (0.452)`: those that went, in order."""
    gone, there = [], set(range(depth))
    for place, found in enumerate(chosen["rounds"]):
        after = chosen["rounds"][place + 1 :]
        remain = set(map(int, after[0])) if after else set(chosen["blocks"])
        gone += sorted((found[str(index)], index) for index in there - remain)
        there = remain
    (worth, first), *others = gone
    told = [f"block {first} (KL divergence without it {worth:.3f})"]
    return ", then ".join([*told, *(f"{index} ({worth:.3f})" for worth, index in others)])


def text(record: dict) -> str:
    """What it is trained on, and judged by."""
    made = record["calibration"]
    size = f"{made['samples']} sequences of {made['seqlen']} tokens"
    if record["options"]["self_text"]:
        return f"written by the teacher; chosen and judged by {size} of {made['source']} text"
    return f"{size} of {made['source']} text, some of them held out"
