"""`quantkit distill`: a student taught by its teacher."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quantkit.cli import flags, running
from quantkit.distillation.options import DistillOptions, SmallerOptions
from quantkit.errors import USAGE, QuantkitError
from quantkit.options import CalibrationOptions, RunOptions

EPILOG = """Examples:

  quantkit distill ./model ./model-gptq-w3g128     (writes ./model-gptq-w3g128-distilled)

  quantkit distill ./model ./model-gptq-w3g128 --dry-run

  quantkit distill ./model model-Q3_K_M.gguf -o better.gguf --eval test.txt

  quantkit distill ./model ./model-nf4 --text mine.txt --samples 512 --seqlen 1024

  quantkit distill ./model ./model-gptq-w2g128 --epochs 0     (block by block alone: constant memory)

  quantkit distill ./model --blocks 24                        (a student of fewer blocks: ./model-b24)

  quantkit distill ./model --blocks 24 --text mine.txt --samples 4096

Never worse: a stage that does not lower the divergence from the teacher on held-out text is not kept;
the exit code is 0 nevertheless."""
TEACHER = Annotated[str, typer.Argument(help="The original: checkpoint folder, GGUF file or hub id.")]
STUDENT = Annotated[
    str | None,
    typer.Argument(
        help="The model that quantkit made from the teacher, in any layout; its codes do not change. Without "
        "STUDENT, --blocks makes a smaller student."
    ),
]
TEXT = Annotated[
    str | None,
    typer.Option(
        help="Training text, an eighth of which is held out: a file (.txt, .jsonl, .parquet) or a dataset, "
        "as for quantkit gptq. Never the text you evaluate on. (default: the shipped text)",
        rich_help_panel="Text",
    ),
]
OUTPUT = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Output folder, or GGUF file. (default: STUDENT-distilled, or TEACHER-b24)"
    ),
]
FORWARD = ("dtype", "device", "batch_size", "threads")  # options of a run that training has
HELP = {  # help that differs from that of other jobs
    "dtype": "Precision of the forward passes; trained values are float32. (auto: float32)",
    "batch_size": "Sequences per step. (default: about 512 tokens; of a smaller student 2,048)",
}
SHARED = DistillOptions.__dataclass_fields__.keys() & SmallerOptions.__dataclass_fields__.keys()
FIXED = (
    "dry_run", "resume", "overwrite", "eval_text", "revision", "offline", "trust_remote_code", "as_json",
    "quiet",
)  # fmt: skip


REQUEST = "output", "revision", "offline", "trust_remote_code", "resume", "overwrite"


def _distill(context: typer.Context, **values: Any) -> None:
    """Run `quantkit distill`."""
    typed = flags.typed(context, values)
    if "text" in typed:
        typed["calibration"] = typed.pop("text")
    smaller = "blocks" in typed
    if values["student"] is None and not smaller:
        hint = "give the compressed model, or --blocks to make a smaller student"
        raise QuantkitError("no STUDENT is given", hint, USAGE)
    if values["student"] is not None and smaller:
        hint = "leave out --blocks, or STUDENT: a smaller student is made from the teacher"
        raise QuantkitError("a compressed STUDENT keeps its shape", hint, USAGE)
    options, other = (SmallerOptions, DistillOptions) if smaller else (DistillOptions, SmallerOptions)
    for name in other.__dataclass_fields__.keys() - options.__dataclass_fields__.keys() & typed.keys():
        whose = "compressed students" if smaller else "smaller students (--blocks)"
        raise QuantkitError(f"--{name.replace('_', '-')} is for {whose}", "leave it out", USAGE)
    flags.check_text(values["eval_text"])
    from quantkit.cli.progress import listener, uncollected

    with listener(values["quiet"]) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.cli import distill_report, job_report
            from quantkit.distillation import job
            from quantkit.distillation.compressed import job as compressed_job
            from quantkit.distillation.smaller import job as smaller_job

        chosen = (flags.options(kind, typed) for kind in (options, CalibrationOptions, RunOptions))
        further = {name: values[name] for name in REQUEST}
        request = job.Request(values["teacher"], values["student"], *chosen, **further)
        kind = smaller_job if smaller else compressed_job
        if job.is_done(request):
            progress.close()
            job_report.print_finished(kind.SCHEMA, [str(job.output_of(request))], values["as_json"])
            return
        prepared = kind.prepare(request, progress, values["eval_text"], values["dry_run"])
        record = prepared.record()
        if not values["dry_run"]:
            staging = prepared.staging

            def made() -> list[Path]:
                return [staging.output] if staging.finished() else []

            with running.resumable([staging.folder], lambda: "the training so far is", made):
                record = prepared.run(progress)
    if values["as_json"]:
        print(json.dumps(record, indent=2))
    else:
        distill_report.print_record(record)


def _shared(row: inspect.Parameter) -> inspect.Parameter:
    """Return a flag of training; the help of one that both kinds have gives both defaults."""
    if row.name in SHARED:
        other = SmallerOptions.__dataclass_fields__[row.name].default
        hint, described = get_type_hints(DistillOptions)[row.name], row.annotation.__metadata__[0]
        described.help += f" (default: {row.default}; of a smaller student {other})"
        return row.replace(default=None, annotation=Annotated[hint | None, described])
    return row


def _worded(row: inspect.Parameter) -> inspect.Parameter:
    """Return a flag of all jobs with the help of this command."""
    if row.name in HELP:
        row.annotation.__metadata__[0].help = HELP[row.name]
    return row


command = flags.sign(
    _distill,
    [
        flags.parameter("teacher", TEACHER),
        flags.parameter("student", STUDENT, None),
        *map(_shared, flags.of("training", DistillOptions)),
        *(row for row in flags.of("a smaller student", SmallerOptions) if row.name not in SHARED),
        flags.parameter("text", TEXT, None),
        *(row for row in flags.of("text", CalibrationOptions) if row.name != "calibration"),
        *map(_worded, flags.of("run", RunOptions, FORWARD)),
        flags.parameter("output", OUTPUT, None),
        *flags.fixed(FIXED),
    ],
)
