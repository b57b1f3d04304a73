"""`quantkit eval`: compare checkpoints on one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import flags, ranks
from quantkit.evaluation.settings import EvalSettings

EPILOG = """Examples:
  quantkit eval ./model ./model-gptq-w4g128     (on the shipped held-out text)
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt
  quantkit eval ./model --as nf4 --as int8 --text test.txt     (nothing is written)
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt --kv-dtype q8_0     (and the cache quantized)
  quantkit eval ./model ./model-w8a8 --text test.txt --weights-only     (the loss of weights alone)
  quantkit eval ./model ./candidate --text test.txt --ctx 2048 --json > result.json
  quantkit eval ./model ./candidate --text test.txt --html report.html --plot plot.svg
  quantkit eval ./model ./candidate --card ./candidate     (a table and metadata in its README.md)
  quantkit eval ./model ./candidate --engine vllm --python ~/vllm/bin/python     (what the engine computes)
  quantkit eval ./model ./candidate --text test.txt --max-ppl-increase 2% --max-kld 0.05

Exit code 7: a gate failed."""
GATES = ("max_ppl_increase", "max_kld", "min_top1")
SUMMARY = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append gates and table as Markdown to this file, such as $GITHUB_STEP_SUMMARY.",
    ),
]
CARD = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Write the results of this model, a folder or a GGUF file, into its card."
    ),
]


def _eval(context: typer.Context, models: list[str], **values: Any) -> None:
    """Run `quantkit eval`."""
    from quantkit.evaluation.comparison import gates
    from quantkit.evaluation.comparison.report import Outputs

    asked, (as_json, quiet) = flags.options(EvalSettings, values), (values["as_json"], values["quiet"])
    asked.check()
    outputs = Outputs(values["html"], values["plot"], values["summary"])
    outputs.check()
    from quantkit.cli.progress import listener, uncollected

    with listener(quiet) as progress:
        with uncollected():  # after the first line of progress: torch takes seconds
            from quantkit.evaluation import job
            from quantkit.evaluation.comparison.table import markdown, report

        opened = values["revision"], values["offline"], values["trust_remote_code"], values["card"]
        result = job.measure(models, asked, progress, *opened)
    comparison = report(result)
    if not as_json:
        comparison.show()
    if ranks.is_first():
        outputs.write(comparison, lambda: markdown(result), as_json=as_json, quiet=quiet)
    gates.refuse_failed(result)  # with --json the record goes with the error
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))


_flags = flags.of("options", EvalSettings)
command = flags.sign(
    _eval,
    [
        flags.parameter("models", flags.MODELS),
        *(row for row in _flags if row.name not in GATES),
        *flags.of("gates (exit code 7 when one fails)", EvalSettings, GATES),
        flags.parameter("summary", SUMMARY, None),
        flags.parameter("card", CARD, None),
        flags.parameter("html", flags.HTML, None),
        flags.parameter("plot", flags.PLOT, None),
        flags.parameter("threads", flags.THREADS, None),
        flags.parameter("revision", flags.FIRST_REVISION, None),
        *flags.fixed(("offline", "trust_remote_code", "as_json", "quiet")),
    ],
)
