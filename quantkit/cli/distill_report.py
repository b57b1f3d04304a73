"""Prints the plan or the result of a distillation."""

from __future__ import annotations

from shlex import quote

from rich.console import Console

from quantkit.cli import job_report
from quantkit.errors import count
from quantkit.evaluation.comparison.table import print_comparison
from quantkit.tables import make_table, megabytes, print_facts


def print_record(record: dict) -> None:
    """Print the record of a finished job, or of a dry run."""
    if "schedule" in record:
        _print_smaller(record)
    else:
        _print_compressed(record)


def _print_compressed(record: dict) -> None:
    console, done = Console(highlight=False, markup=False), "stages" in record
    options, made, held_out = record["options"], record["calibration"], record["sequences"]["held_out"]
    memory, execution, trained = record["memory"], record["execution"], record["trained"]
    facts = {
        "written" if done else "output": record["output"],
        "trained": f"floats of {count(trained['linears'], 'linear')}, "
        f"{count(trained['norms_and_biases'], 'tensor')} of norms and biases; codes stay",
        "text": f"{made['samples']} sequences of {made['seqlen']} tokens, {made['source']} text; "
        f"{held_out} held out",
    }
    if not done:
        how = "codes of all blocks in memory" if memory["hold"] else "codes read again for every block"
        whole = f", {megabytes(memory['whole'])} end to end ({how})" if options["epochs"] else ""
        facts["stages"] = _stages(options)
        blocks = f"about {megabytes(memory['blocks'])} block by block{whole}"
        facts["memory"] = f"{blocks}, on {execution['device']}, and Python itself"
        facts["computes"] = job_report.computes(execution, True)
        print_facts(console, facts)
        return
    seconds = record["seconds"]
    parts = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
    facts["seconds"] = f"{sum(seconds.values()):.1f} ({parts})"
    print_facts(console, facts)
    table = make_table("held-out KL divergence", "before", "after", "")
    for stage in record["stages"]:
        verdict = "kept" if stage["kept"] else "not kept"
        table.add_row(stage["name"], f"{stage['before']:.5f}", f"{stage['after']:.5f}", verdict)
    console.print(table)
    if record["improved"]:
        share = 1 - record["after"] / record["before"]
        console.print(
            f"divergence from the teacher: {record['before']:.5f} → {record['after']:.5f} (-{share:.1%})"
        )
    else:
        console.print("nothing was better than the student as it is: its tensors were copied unchanged")
    if "eval" in record:
        print_comparison(record["eval"])
    else:
        names = " ".join(quote(record[key]) for key in ("teacher", "student", "output"))
        console.print(f"\nnext: quantkit eval {names}", markup=False, soft_wrap=True)


def _stages(options: dict) -> str:
    """Return a phrase such as `2 epochs for each block, then 4 epochs end to end`."""
    each = [f"{count(options['block_epochs'], 'epoch')} for each block"] * bool(options["block_epochs"])
    whole = [f"{count(options['epochs'], 'epoch')} end to end"] * bool(options["epochs"])
    return ", then ".join(each + whole)


def _print_smaller(record: dict) -> None:
    """Print the record of `quantkit shrink`: the result, or the plan if it has no `published`."""
    console, done = Console(highlight=False, markup=False), "published" in record
    big, small, how, schedule = record["teacher"], record["student"], record["execution"], record["schedule"]
    share = f"{small['parameters']:,} of {big['parameters']:,} parameters"
    size = f", {megabytes(small['bytes'])} of {megabytes(big['bytes'])}" if done else ""
    depth = f"{small['blocks']} of {big['blocks']} blocks"
    made = record["calibration"]
    tokens = schedule["batch"] * made["seqlen"]
    facts = {"written" if done else "output": small["output"], "student": f"{depth}; {share}{size}"}
    if done:
        facts["left out"] = left_out(record["chosen"], big["blocks"])
    facts["text"] = (
        f"{made['samples']} sequences of {made['seqlen']} tokens of {made['source']} text, "
        "some of them held out"
    )
    facts["training"] = f"{schedule['steps']:,} steps of {schedule['batch']} sequences, {tokens:,} tokens"
    facts["computes"] = job_report.computes(how, False) + f", on {how['device']}"
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
    """Return the blocks left out, in order: `block 3 (KL divergence without it 0.202), then 1 (0.452)`."""
    rounds = chosen["rounds"]

    def last(index: int) -> tuple[int, float]:
        """Return in how many rounds a block took part, and its divergence in the last of these."""
        found = [values[str(index)] for values in rounds if str(index) in values]
        return len(found), found[-1]

    gone = sorted((*last(index), index) for index in set(range(depth)) - set(chosen["blocks"]))
    (_, worth, first), *others = gone
    parts = [f"block {first} (KL divergence without it {worth:.3f})"]
    return ", then ".join([*parts, *(f"{index} ({worth:.3f})" for _, worth, index in others)])
