"""One command per method, made from its `Options` and the options every method shares."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quantkit import methods, recipe
from quantkit.errors import INTERRUPTED, QuantkitError
from quantkit.options import CalibrationOptions, RunOptions

OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Output folder. (default: NAME-METHOD-…, in the current folder)"),
]
FIXED: dict[str, tuple[Any, Any]] = {  # flags that are no options of the job itself: (annotation, default)
    "output": (OUTPUT, None),
    "recipe_name": (
        Annotated[
            str | None, typer.Option("--recipe", help="Take options from a shipped recipe or a YAML file.")
        ],
        None,
    ),
    "dry_run": (
        Annotated[
            bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is loaded or written.")
        ],
        False,
    ),
    "resume": (
        Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same job.")],
        False,
    ),
    "overwrite": (
        Annotated[bool, typer.Option("--overwrite", help="Replace an existing output or staged job.")],
        False,
    ),
    "eval_text": (
        Annotated[
            Path | None,
            typer.Option(
                "--eval", metavar="TEXT", help="Measure original and result on this text right away."
            ),
        ],
        None,
    ),
    "revision": (Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")], None),
    "offline": (Annotated[bool, typer.Option("--offline", help="Use the local hub cache only.")], False),
    "trust_remote_code": (
        Annotated[
            bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
        ],
        False,
    ),
    "as_json": (Annotated[bool, typer.Option("--json", help="Print the result as JSON.")], False),
    "quiet": (
        Annotated[bool, typer.Option("--quiet", "-q", help="No progress; warnings and errors only.")],
        False,
    ),
}


def epilog(method: str) -> str:
    """Examples under the help of a method's command."""
    return f"""Examples:

  quantkit {method} ./model

  quantkit {method} org/name -o ./out --calibration text.txt --seqlen 2048

  quantkit {method} ./model --resume     (after an interruption)"""


def command(method: str) -> Callable[..., None]:
    """The function behind `quantkit METHOD`; Typer reads its flags off the signature made here."""
    sections = {
        "Method": methods.load(method).Options,
        "Calibration": CalibrationOptions,
        "Run": RunOptions,
    }

    def invoke(context: typer.Context, model: str, **values: Any) -> None:
        if values["recipe_name"]:
            chosen = recipe.load(values["recipe_name"], method, tuple(sections.values()))
            for key, value in chosen.items():
                if context.get_parameter_source(key).name != "COMMANDLINE":
                    values[key] = value
        options, calibration, run = (_fill(section, values) for section in sections.values())
        _quantize(method, model, options, calibration, run, values)

    parameters = [
        _parameter("context", typer.Context),
        _parameter("model", Annotated[str, typer.Argument(help="Checkpoint folder or hub id.")]),
    ]
    for panel, section in sections.items():
        hints = get_type_hints(section)
        for field in dataclasses.fields(section):
            kind = list[str] if hints[field.name] == tuple[str, ...] else hints[field.name]
            described = typer.Option(help=field.metadata["help"], rich_help_panel=panel)
            parameters.append(_parameter(field.name, Annotated[kind, described], field.default))
    parameters += [_parameter(name, kind, default) for name, (kind, default) in FIXED.items()]
    invoke.__signature__ = inspect.Signature(parameters)
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return invoke


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    if isinstance(default, tuple):
        default = list(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _fill(section: type, values: dict[str, Any]) -> Any:
    chosen = {field.name: values[field.name] for field in dataclasses.fields(section)}
    return section(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
    )


def _quantize(
    method: str, model: str, options: Any, calibration: Any, run: Any, values: dict[str, Any]
) -> None:
    from quantkit import job, pipeline, report
    from quantkit.cli.progress import listener

    request = job.Request(
        source=model,
        method=method,
        options=options,
        calibration=calibration,
        run=run,
        output=values["output"],
        **{key: values[key] for key in ("revision", "offline", "trust_remote_code", "resume", "overwrite")},
    )
    with listener(values["quiet"]) as progress:
        prepared = job.prepare(request, progress, dry_run=values["dry_run"])
        if values["dry_run"]:
            progress.close()
            if values["as_json"]:
                print(json.dumps(report.plan_record(prepared), indent=2))
            else:
                report.print_plan(prepared)
            return
        windows = _windows(prepared, values["eval_text"])  # a text that does not serve is noticed here
        with _resumable(prepared.staging.folder):
            summary = pipeline.run(prepared, progress)
        results = _evaluate(prepared, windows, progress) if windows else None
    if values["as_json"]:
        print(json.dumps(report.summary_record(summary, results), indent=2))
    else:
        report.print_summary(summary, results)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Answer an interrupt with the way to go on.

    It is the signal that counts: torch turns some KeyboardInterrupts into other exceptions.
    """
    interrupts = []

    def interrupt(*arguments: Any) -> None:
        interrupts.append(arguments)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException as error:
        if not interrupts:
            raise
        raise QuantkitError(
            f"interrupted; finished blocks are kept in {folder}",
            hint=f"continue with: {_again()}",
            exit_code=INTERRUPTED,
        ) from error
    finally:
        signal.signal(signal.SIGINT, before)


def _again() -> str:
    """The command as typed, with --resume; --overwrite stays, for there is an output to be replaced."""
    typed = [argument for argument in sys.argv[1:] if argument != "--resume"]
    return shlex.join(["quantkit", *typed, "--resume"])


def _windows(prepared: Any, text: Path | None) -> Any:
    """The text of --eval, where it is given."""
    from quantkit import evaluate

    return evaluate.load_windows(prepared.checkpoint, text, None, None, None) if text else None


def _evaluate(prepared: Any, windows: Any, progress: Any) -> Any:
    """Original and result on the text of --eval."""
    import torch

    from quantkit import evaluate
    from quantkit.checkpoint import Checkpoint

    trusted = prepared.request.trust_remote_code
    made = Checkpoint.open(str(prepared.staging.output), trust_remote_code=trusted)
    device = prepared.plan.execution.torch_device
    results = evaluate.evaluate(
        [prepared.checkpoint, made], windows, torch.float32, device, progress.evaluating
    )
    return evaluate.record(windows, torch.float32, results)
