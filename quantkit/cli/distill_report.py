"""Prints the plan or the result of a distillation."""

from shlex import quote

from rich.console import Console

from quantkit.cli import job_report
from quantkit.errors import count
from quantkit.evaluation.comparison.table import report
from quantkit.tables import make_table, megabytes, print_facts, print_refused


def print_record(record: dict) -> None:
    """Print the record of a finished job, or of a dry run."""
    console, done = Console(highlight=False, markup=False), "stages" in record
    options, made, held_out = record["options"], record["calibration"], record["sequences"]["held_out"]
    memory, execution, trained = record["memory"], record["execution"], record["trained"]
    facts = {
        "written" if done else "output": record["output"],
        "trained": f"floats of {count(trained['linears'], 'linear')}, "
        f"{count(trained['norms_and_biases'], 'tensor')} of norms and biases; codes stay",
        "text": f"{job_report.calibration(made)}; {held_out} held out",
    }
    if not done:
        how = "codes of all blocks in memory" if memory["hold"] else "codes read again for every block"
        whole = f", {megabytes(memory['whole'])} end to end ({how})" if options["epochs"] else ""
        facts["stages"] = _stages(options)
        blocks = f"about {megabytes(memory['blocks'])} block by block{whole}"
        facts["memory"] = f"{blocks}, on {execution['device']}, and Python itself"
        facts["computes"] = job_report.computes(execution, True)
        print_refused(console, record["refused"])
        print_facts(console, facts)
        return
    facts["seconds"] = job_report.total(record["seconds"])
    print_facts(console, facts)
    table = make_table("held-out KL divergence", "before", "after", "")
    for stage in record["stages"]:
        verdict = "kept" if stage["kept"] else "not kept"
        table.add_row(stage["name"], f"{stage['before']:.5f}", f"{stage['after']:.5f}", verdict)
    console.print(table)
    if record["improved"]:
        share = 1 - record["after"] / record["before"]
        change = f"{record['before']:.5f} → {record['after']:.5f} (-{share:.1%})"
        console.print(f"divergence from the teacher: {change}")
    else:
        console.print("nothing was better than the student as it is: its tensors were copied unchanged")
    if "eval" in record:
        report(record["eval"]).show()
    else:
        names = " ".join(quote(record[key]) for key in ("teacher", "student", "output"))
        console.print(f"\nnext: quantkit eval {names}", soft_wrap=True)


def _stages(options: dict) -> str:
    """Return a phrase such as `2 epochs for each block, then 4 epochs end to end`."""
    each = [f"{count(options['block_epochs'], 'epoch')} for each block"] * bool(options["block_epochs"])
    whole = [f"{count(options['epochs'], 'epoch')} end to end"] * bool(options["epochs"])
    return ", then ".join(each + whole)
