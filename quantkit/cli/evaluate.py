"""`quantkit eval`: compare checkpoints on one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli import flags, ranks
from quantkit.options import parse_tokens

EPILOG = """Examples:
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt
  quantkit eval ./model --as nf4 --as int8 --text test.txt     (nothing is written)
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt --kv-dtype q8_0     (and the cache quantized)
  quantkit eval ./model ./model-w8a8 --text test.txt --weights-only     (the loss of weights alone)
  quantkit eval ./model ./candidate --text test.txt --ctx 2048 --json > result.json
  quantkit eval ./model ./candidate --text test.txt --html report.html --plot plot.svg
  quantkit eval ./model ./candidate --text test.txt --max-ppl-increase 2% --max-kld 0.05

Exit code 7: a gate failed."""
GATES = "Gates (exit code 7 when one fails)"


def command(
    models: flags.MODELS,
    text: Annotated[Path, typer.Option(help="UTF-8 text to evaluate on. Never the calibration text.")],
    trials: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="METHOD[,OPTION=VALUE…]",
            help="Evaluate the first model as quantized by this method, without writing anything: int8, nf4 "
            "or fp8, or a method with options that need no text, such as fp4,solver=rtn. Repeatable.",
        ),
    ] = None,
    kv_dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-dtype",
            metavar="TYPE",
            help="Evaluate every model also with a key/value cache of this type: fp8 as in vLLM, q8_0 or "
            "q4_0 as in llama.cpp. Repeatable.",
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Evaluate models whose clients quantize activations (int8, fp8, w8a8, fp4) also without "
            "quantized activations, to separate the two losses.",
        ),
    ] = False,
    ctx: Annotated[
        int | None,
        typer.Option(
            parser=parse_tokens,
            metavar="TOKENS",
            help="Tokens of each window of the text, such as 2048 or 4k. (default: 2048, at most the model's "
            "context)",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from the start of a window to the start of the next. (default: --ctx, no overlap)"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first N tokens of the text.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Tasks of lm-evaluation-harness, separated by commas; needs pip install 'quantkit[tasks]'. "
            "The task cloze comes with quantkit; the data of others is downloaded from the hub.",
        ),
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option(help="Run the first N examples of every task only.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Metrics, separated by commas: ppl, dppl, kld, top1, floor. Without kld and top1, less is "
            "computed. (default: all)",
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT",
            help="Largest increase of perplexity over the first model: 2%, or a difference such as 0.5.",
            rich_help_panel=GATES,
        ),
    ] = None,
    max_kld: Annotated[
        str | None,
        typer.Option(metavar="LIMIT", help="Largest mean KL divergence, in nats.", rich_help_panel=GATES),
    ] = None,
    min_top1: Annotated[
        str | None,
        typer.Option(metavar="LIMIT", help="Smallest top-1 agreement: 0.9 or 90%.", rich_help_panel=GATES),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append gates and table as Markdown to this file, such as $GITHUB_STEP_SUMMARY.",
        ),
    ] = None,
    html: flags.HTML = None,
    plot: flags.PLOT = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Precision of the forward passes; 16 bit adds noise to small divergences."),
    ] = "float32",
    device: flags.DEVICE = "auto",
    threads: flags.THREADS = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory of the whole process at most, such as 6GB. Hidden states that do not fit are "
            "kept in a file in TMPDIR or /var/tmp. (default: the free memory)",
        ),
    ] = None,
    revision: flags.FIRST_REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """Run `quantkit eval`."""
    from quantkit.evaluation import metrics as metrics_of
    from quantkit.evaluation.comparison import gates
    from quantkit.evaluation.comparison.files import Outputs
    from quantkit.models import kv_types
    from quantkit.options import size_bytes

    chosen, most = metrics_of.select(metrics), max_memory and size_bytes(max_memory, "--max-memory")
    limits = gates.parse(max_ppl_increase, max_kld, min_top1)
    caches = list(dict.fromkeys(map(kv_types.named, kv_dtypes or ())))
    gates.check(limits, chosen, (len(models) + len(trials or ())) * (1 + len(caches)) - 1)
    outputs = Outputs(html, plot, summary)
    outputs.check()

    from quantkit.cli.progress import listener, uncollected

    with listener(quiet) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            import torch

            from quantkit.evaluation import evaluate
            from quantkit.evaluation import windows as windows_of
            from quantkit.evaluation.comparison.record import record
            from quantkit.evaluation.comparison.table import markdown, report
            from quantkit.evaluation.tasks import Tasks
            from quantkit.models.files.open import open_checkpoint
            from quantkit.models.machine.device import choose_device

        checkpoints = [
            open_checkpoint(model, revision if position == 0 else None, offline, trust_remote_code)
            for position, model in enumerate(models)
        ]
        precision, place = getattr(torch, dtype), choose_device(device)
        windows = windows_of.load(checkpoints[0], text, ctx, stride, limit)
        if windows.note:
            progress.warn(windows.note)
        harness = Tasks.prepare(tasks, task_limit) if tasks else None
        measured = evaluate.evaluate(
            checkpoints, windows, precision, place, progress.evaluating, trials or (), chosen, harness,
            caches, weights_only, most,
        )  # fmt: skip
    given = harness.record() if harness else None
    result = record(windows.protocol, precision, place, measured, chosen, limits, given)
    found = report(result)
    if not as_json:
        found.show()
    if ranks.is_first():
        outputs.write(found.figures, found.page, lambda: markdown(result), as_json=as_json, quiet=quiet)
    gates.refuse_failed(result)  # with --json the record goes with the error
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
