"""Train scales and norms of a compressed model to predict what the original does.

Examples:
  quantkit distill ./model ./model-gptq-w3g128     # writes ./model-gptq-w3g128-distilled
  quantkit distill ./model ./model-gptq-w3g128 --dry-run
  quantkit distill ./model model-Q3_K_M.gguf -o better.gguf --eval test.txt
  quantkit distill ./model ./model-nf4 --calibration mine.txt --samples 512 --seqlen 1024
  quantkit distill ./model ./model-gptq-w2g128 --epochs 0     # block by block alone: constant memory

Never worse: a stage that does not lower the divergence from the teacher on held-out text is not kept;
the exit code is 0 nevertheless.
"""

from shlex import quote
from typing import Any

from quantkit.cli import flags, running, streams
from quantkit.distillation.options import DistillOptions
from quantkit.errors import count
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.tables import make_console, make_table, print_facts, print_refused, print_table

FORWARD = ("dtype", "device", "batch_size", "threads")  # run options that training uses
HELP = {  # help that differs from that of other jobs
    "calibration": "Training text; an eighth more is held out: a .txt, .jsonl, .json, .csv, .tsv or .parquet "
    "file, or a hub dataset as for quantkit gptq. Never the text you evaluate on. (default: the shipped "
    "text)",
    "batch_size": "Sequences per step. (default: about 512 tokens)",
    "dtype": "Precision of the forward passes; trained values are float32. auto: float32.",
    "output": "Output folder or GGUF file. (default: STUDENT-distilled in the current folder)",
}


@flags.command(
    *flags.of("training", DistillOptions),
    *flags.of("calibration", CalibrationOptions, helps=HELP),
    *flags.of("run", RunOptions, FORWARD, HELP),
    shared=("output", "dry_run", "resume", "overwrite", "eval_text", *flags.OPENING),
    helps=HELP,
)
def command(
    teacher: flags.argument("The original model: checkpoint folder, GGUF file or hub id."),
    student: flags.argument(
        "The model that quantkit compressed from the teacher. Its codes stay; scales and norms change."
    ),
    **values: Any,
) -> None:
    flags.check_text(values["eval_text"])
    options = flags.options(DistillOptions, values)
    options.check()
    with streams.listener(values["quiet"]) as progress:
        from quantkit.distillation import job, request

        asked = {"teacher": teacher, "student": student, "options": options}
        asked |= {"calibration": flags.options(CalibrationOptions, values)}
        asked = flags.options(request.Request, values | asked | {"run": flags.options(RunOptions, values)})
        if request.is_done(asked):
            progress.close()
            output = str(asked.destination)
            record = {"schema": job.SCHEMA, "output": output, "finished": True}
            return streams.present(record, values["as_json"], lambda: print(f"{output} is already finished"))
        prepared = job.prepare(asked, progress, values["eval_text"], values["dry_run"])
        record = prepared.record() | {"refused": prepared.refused}
        if not values["dry_run"]:
            with running.resumable([prepared.staging], kept=lambda: "the training so far is"):
                record = prepared.run(progress)
    teacher = prepared.training.teacher.checkpoint
    streams.present(record, values["as_json"], lambda: show(record, teacher))


def show(record: dict[str, Any], teacher: Any) -> None:
    """Print the record of a finished job, or of a dry run. teacher: the original's checkpoint."""
    from quantkit.cli import job_report
    from quantkit.evaluation.comparison.table import report

    console, done = make_console(), "stages" in record
    options, made, held_out = record["options"], record["calibration"], record["sequences"]["held_out"]
    memory, execution, trained = record["memory"], record["execution"], record["trained"]
    facts = {
        "written" if done else "output": record["output"],
        "trained": f"floats of {count(trained['linears'], 'linear')}, "
        f"{count(trained['norms_and_biases'], 'tensor')} of norms and biases; codes stay",
        "text": f"{job_report.calibration(made)}; {held_out} held out",
    }
    if not done:
        facts["stages"] = _stages(options)
        peak = job_report.memory_of(teacher, execution["device"], max(memory["blocks"], memory["whole"]))
        how = "codes of all blocks in memory" if memory["hold"] else "codes read again for every block"
        facts["memory"] = f"about {peak}" + (f"; end to end, {how}" if options["epochs"] else "")
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
    print_table(console, table)
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
