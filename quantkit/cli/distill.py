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

from typing import Any

from quantkit.cli import flags, running, streams
from quantkit.distillation.options import DistillOptions
from quantkit.options import CalibrationOptions, RunOptions

FORWARD = ("dtype", "device", "batch_size", "threads")  # run options that training uses
HELP = {  # help that differs from that of other jobs
    "calibration": "Training text; an eighth more is held out: a .txt, .jsonl, .csv, .tsv or .parquet file, "
    "or a hub dataset as for quantkit gptq. Never the text you evaluate on. (default: the shipped text)",
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
        with streams.uncollected():  # after the first line of progress: torch takes seconds
            from quantkit.cli import distill_report
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
    streams.present(record, values["as_json"], lambda: distill_report.print_record(record))
