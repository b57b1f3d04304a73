"""`quantkit distill`: train a compressed student on its teacher; `quantkit shrink` uses the same code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import flags, running
from quantkit.distillation.options import DistillOptions, SmallerOptions
from quantkit.options import CalibrationOptions, RunOptions

EPILOG = """Examples:
  quantkit distill ./model ./model-gptq-w3g128     (writes ./model-gptq-w3g128-distilled)
  quantkit distill ./model ./model-gptq-w3g128 --dry-run
  quantkit distill ./model model-Q3_K_M.gguf -o better.gguf --eval test.txt
  quantkit distill ./model ./model-nf4 --calibration mine.txt --samples 512 --seqlen 1024
  quantkit distill ./model ./model-gptq-w2g128 --epochs 0     (block by block alone: constant memory)

Never worse: a stage that does not lower the divergence from the teacher on held-out text is not kept;
the exit code is 0 nevertheless."""
TEACHER = Annotated[str, typer.Argument(help="The original model: checkpoint folder, GGUF file or hub id.")]
STUDENT = Annotated[
    str,
    typer.Argument(
        help="The model that quantkit compressed from the teacher. Its codes stay; scales and norms change."
    ),
]
FORWARD = ("dtype", "device", "batch_size", "threads")  # run options that training uses
HELP = {  # help that differs from that of other jobs
    "calibration": "Training text, an eighth of which is held out: a .txt, .jsonl or .parquet file, or a hub "
    "dataset as for quantkit gptq. Never the text you evaluate on. (default: the shipped text)",
    "dtype": "Precision of the forward passes; trained values are float32. auto: float32.",
}
FIXED = (
    "dry_run", "resume", "overwrite", "eval_text", "revision", "offline", "trust_remote_code", "as_json",
    "quiet",
)  # fmt: skip
REQUEST = "output", "revision", "offline", "trust_remote_code", "resume", "overwrite"


def training(
    kind: type[DistillOptions | SmallerOptions], models: Sequence[Parameter], output: str, batch_tokens: str
) -> Callable[..., None]:
    """Return the function that runs `quantkit distill` or `quantkit shrink`.

    kind: dataclass of its options. models: arguments that name teacher and student. output: help of --output.
    batch_tokens: default tokens per batch, for the help.
    """

    def invoke(context: typer.Context, **values: Any) -> None:
        flags.check_text(values["eval_text"])
        options = flags.options(kind, values)
        options.check()
        _train(values, options, flags.typed(context, values))

    help = HELP | {"batch_size": f"Sequences per step. (default: about {batch_tokens} tokens)"}
    rows = [
        *flags.of("training", kind),
        *flags.of("calibration", CalibrationOptions),
        *flags.of("run", RunOptions, FORWARD),
    ]
    for row in rows:
        described = row.annotation.__metadata__[0]
        described.help = help.get(row.name, described.help)
    place = typer.Option("--output", "-o", help=output)
    rows.append(flags.parameter("output", Annotated[Path | None, place], None))
    return flags.sign(invoke, [*models, *rows, *flags.fixed(FIXED)])


def _train(values: dict[str, Any], options: DistillOptions | SmallerOptions, typed: dict[str, Any]) -> None:
    from quantkit.cli.progress import listener, uncollected

    with listener(values["quiet"]) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.cli import distill_report, job_report
            from quantkit.distillation import job
            from quantkit.distillation.compressed import job as compressed_job
            from quantkit.distillation.smaller import job as smaller_job

        chosen = (flags.options(shared, typed) for shared in (CalibrationOptions, RunOptions))
        further = {name: values[name] for name in REQUEST}
        request = job.Request(values["teacher"], values.get("student"), options, *chosen, **further)
        kind = smaller_job if isinstance(options, SmallerOptions) else compressed_job
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


command = training(
    DistillOptions,
    [flags.parameter("teacher", TEACHER), flags.parameter("student", STUDENT)],
    "Output folder or GGUF file. (default: STUDENT-distilled in the current folder)",
    "512",
)
