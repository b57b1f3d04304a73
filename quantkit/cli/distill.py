"""`quantkit distill`: a student taught by its teacher."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import flags, manners
from quantkit.distillation.options import DistillOptions
from quantkit.errors import EXIT_CODES, NOT_FOUND, USAGE, QuantkitError
from quantkit.options import CalibrationOptions, RunOptions

EPILOG = """Examples:

  quantkit distill ./model ./model-gptq-w3g128     (writes ./model-gptq-w3g128-distilled)

  quantkit distill ./model ./model-gptq-w3g128 --dry-run

  quantkit distill ./model model-Q3_K_M.gguf -o better.gguf --eval test.txt

  quantkit distill ./model ./model-nf4 --text mine.txt --samples 512 --seqlen 1024

  quantkit distill ./model ./model-gptq-w2g128 --epochs 0     (block by block alone: constant memory)

Never worse: what does not lower the divergence from the teacher on text held out of the training is not kept;
the exit code is 0 all the same."""
TEACHER = Annotated[str, typer.Argument(help="The original: checkpoint folder, GGUF file or hub id.")]
STUDENT = Annotated[
    str | None, typer.Argument(help="What quantkit made of it, in any layout. Its codes stay as they are.")
]
TEXT = Annotated[
    str | None,
    typer.Option(
        help="Text to learn on, an eighth of it held out: a file (.txt, .jsonl, .parquet) or a dataset, as "
        "for quantkit gptq. Never the text you evaluate on. (default: the shipped text)",
        rich_help_panel="Text",
    ),
]
CALIBRATION = Annotated[
    str | None,
    typer.Option(help="The same, as jobs call it.", rich_help_panel="Text"),
]
OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Output folder, or GGUF file. (default: STUDENT-distilled)"),
]
FORWARD = ("dtype", "device", "batch_size", "threads")  # what of a run concerns training
HELP = {  # where training differs from what jobs say
    "dtype": "Precision of the forward passes; what is trained is float32. (auto: float32)",
    "batch_size": "Sequences per step. (default: about 512 tokens)",
}
FIXED = (
    "dry_run", "resume", "overwrite", "eval_text", "revision", "offline", "trust_remote_code", "as_json",
    "quiet",
)  # fmt: skip


def _command() -> Callable[..., None]:
    """The function behind `quantkit distill`."""

    def invoke(context: typer.Context, **values: Any) -> None:
        typed = flags.typed(context, values)
        if "text" in typed:
            if typed.get("calibration", typed["text"]) != typed["text"]:
                raise QuantkitError("--text and --calibration name two texts", "give one of them", USAGE)
            typed["calibration"] = typed["text"]
        if values["student"] is None:
            raise QuantkitError(
                "no STUDENT is given", "name what was made of the teacher; see quantkit distill --help", USAGE
            )
        _compressed(typed, values)

    parameters = [flags.parameter("teacher", TEACHER), flags.parameter("student", STUDENT, None)]
    parameters += flags.of("training", DistillOptions)
    parameters += [flags.parameter("text", TEXT, None), flags.parameter("calibration", CALIBRATION, None)]
    parameters += [row for row in flags.of("text", CalibrationOptions) if row.name != "calibration"]
    parameters += [_worded(row) for row in flags.of("run", RunOptions, FORWARD)]
    parameters += [flags.parameter("output", OUTPUT, None)]
    parameters += [flags.parameter(name, *flags.FIXED[name]) for name in FIXED]
    return flags.sign(invoke, parameters)


def _worded(row: Any) -> Any:
    """A flag of all jobs in the words of this one."""
    if row.name in HELP:
        row.annotation.__metadata__[0].help = HELP[row.name]
    return row


command = _command()


def _compressed(typed: dict[str, Any], values: dict[str, Any]) -> None:
    """A compressed student, whose floats are trained."""
    if (text := values["eval_text"]) and not text.is_file():
        raise QuantkitError(
            f"text {text} cannot be read: no such file", "check the path given to --eval", NOT_FOUND
        )
    from quantkit.cli.progress import listener, uncollected

    with listener(values["quiet"]) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.cli import distill_report
            from quantkit.distillation import job, run
            from quantkit.evaluation import windows as windows_of

        request = job.Request(
            teacher=values["teacher"],
            student=values["student"],
            options=DistillOptions(**_fields(DistillOptions, typed)),
            calibration=CalibrationOptions(**_fields(CalibrationOptions, typed)),
            run=RunOptions(**_fields(RunOptions, typed)),
            **{
                key: values[key]
                for key in ("output", "revision", "offline", "trust_remote_code", "resume", "overwrite")
            },
        )
        if job.is_done(request):
            progress.close()
            distill_report.print_finished(request, values["as_json"])
            return
        prepared = job.prepare(request, progress, values["dry_run"])
        evaluation = None
        if values["dry_run"]:
            record = prepared.record()
        else:
            if text:  # one that does not serve is noticed here
                windows = windows_of.load(prepared.teacher.checkpoint, text, None, None, None)
            with _resumable(prepared.staging.folder):
                record = run.run(prepared, progress)
            evaluation = _evaluate(prepared, windows, progress) if text else None
    if values["as_json"]:
        print(json.dumps(record | ({"eval": evaluation} if evaluation else {}), indent=2))
    else:
        distill_report.print_record(record, evaluation)


def _fields(options: type, typed: dict[str, Any]) -> dict[str, Any]:
    return {name: typed[name] for name in options.__dataclass_fields__ if name in typed}


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Answer what asks to stop with the way to go on."""
    with manners.stopping() as asked:
        try:
            yield
        except BaseException as error:
            if not asked:
                raise
            again = [argument for argument in sys.argv[1:] if argument != "--resume"]
            raise QuantkitError(
                f"{EXIT_CODES[asked[0]]}; what was learned is kept in {folder}",
                hint=f"continue with: {shlex.join(['quantkit', *again, '--resume'])}",
                exit_code=asked[0],
            ) from error


def _evaluate(prepared: Any, windows: Any, progress: Any) -> Any:
    """Teacher, student and result on the text of --eval."""
    import torch

    from quantkit.evaluation import evaluate
    from quantkit.evaluation.comparison.record import record
    from quantkit.evaluation.metrics import select
    from quantkit.models.open import open_checkpoint

    request, device = prepared.request, prepared.teacher.device
    trusted = request.trust_remote_code
    students = [request.student, str(prepared.staging.output)]
    checkpoints = [prepared.teacher.checkpoint]
    checkpoints += [open_checkpoint(one, trust_remote_code=trusted) for one in students]
    measured = evaluate.evaluate(checkpoints, windows, torch.float32, device, progress.evaluating)
    return record(windows.protocol, torch.float32, device, measured, select(None))
