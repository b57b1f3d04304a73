"""`quantkit eval`: perplexity and KL divergence of several checkpoints over one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

EPILOG = """Examples:

  quantkit eval ./model ./model-gptq-w4g128 --text test.txt

  quantkit eval ./model --as nf4 --as int8 --text test.txt     (nothing is written)

  quantkit eval ./model ./candidate --text test.txt --ctx 2048 --json > result.json"""


def command(
    models: Annotated[
        list[str], typer.Argument(help="Checkpoints: the first is what the others are compared to.")
    ],
    text: Annotated[Path, typer.Option(help="UTF-8 text to measure on. Never the calibration text.")],
    trials: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="METHOD",
            help="Measure the first model as this data-free method (int8, nf4) would leave it, without "
            "writing anything. Repeatable.",
        ),
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(help="Tokens per window. (default: 2048, at most the model's context)")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows. (default: ctx)")] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first N tokens of the text.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Precision of the forward passes; 16 bit adds noise to small divergences."),
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto: cuda where there is one.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the first model's hub id.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use the local hub cache only.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON and nothing else.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress; warnings and errors only.")
    ] = False,
) -> None:
    """Perplexity, and KL divergence to the first model, of checkpoints of any layout."""
    import torch

    from quantkit import evaluate, plan, report
    from quantkit import windows as windows_of
    from quantkit.checkpoint import Checkpoint
    from quantkit.cli.progress import listener

    checkpoints = [
        Checkpoint.open(model, revision if position == 0 else None, offline, trust_remote_code)
        for position, model in enumerate(models)
    ]
    precision = getattr(torch, dtype)
    windows = windows_of.load(checkpoints[0], text, ctx, stride, limit)
    with listener(quiet) as progress:
        results = evaluate.evaluate(
            checkpoints, windows, precision, plan.choose_device(device), progress.evaluating, trials or ()
        )
    record = evaluate.record(windows, precision, results)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        report.print_evaluation(record)
