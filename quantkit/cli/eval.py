"""Compare checkpoints with the first: perplexity, KL divergence, tasks.

Examples:
  quantkit eval ./model ./model-gptq-w4g128     # on the shipped held-out text
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt
  quantkit eval ./model --as nf4 --as int8 --text test.txt     # nothing is written
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt --kv-dtype q8_0     # and the cache quantized
  quantkit eval ./model ./model-w8a8 --text test.txt --weights-only     # the loss of weights alone
  quantkit eval ./model ./candidate --text test.txt --ctx 2048 --json > result.json
  quantkit eval ./model ./candidate --text test.txt --html report.html --plot plot.svg
  quantkit eval ./model ./candidate --card ./candidate     # a table and metadata in its README.md
  quantkit eval ./model ./candidate --engine vllm --python ~/vllm/bin/python     # what the engine computes
  quantkit eval ./model ./candidate --text test.txt --max-ppl-increase 2% --max-kld 0.05

Exit code 7: a gate failed.
"""

from pathlib import Path
from typing import Any

from quantkit.cli import flags, ranks, streams
from quantkit.evaluation.settings import EvalSettings
from quantkit.tables import print_written

GATES = ("max_ppl_increase", "max_kld", "min_top1")
FLAGS = [row for row in flags.of("options", EvalSettings) if row.name not in GATES]
FLAGS += flags.of("gates (exit code 7 when one fails)", EvalSettings, GATES)


@flags.command(*FLAGS, shared=("html", "plot", "threads", *flags.OPENING), helps=flags.FIRST_REVISION)
def command(
    models: flags.MODELS,
    summary: flags.flag(
        "Append gates and table as Markdown to this file, such as $GITHUB_STEP_SUMMARY.",
        Path | None,
        metavar="FILE",
    ) = None,
    card: flags.flag(
        "Write the results of this model, a folder or a GGUF file, into its card.",
        Path | None,
        metavar="FOLDER",
    ) = None,
    **values: Any,
) -> None:
    from quantkit.evaluation.comparison import gates, record
    from quantkit.evaluation.comparison.report import Outputs
    from quantkit.models.files.card import path_of

    asked, (as_json, quiet) = flags.options(EvalSettings, values), (values["as_json"], values["quiet"])
    asked.check()
    outputs = Outputs(values["html"], values["plot"], summary)
    outputs.check()
    with streams.listener(quiet) as progress:
        from quantkit.evaluation import runs
        from quantkit.evaluation.comparison.table import markdown, report

        opened = values["revision"], values["offline"], values["trust_remote_code"], card
        result = runs.measure(models, asked, progress, *opened)
    comparison = report(result)

    def finish() -> None:
        if ranks.is_first():
            outputs.write(comparison, lambda: markdown(result), as_json=as_json, quiet=quiet)
            print_written([path_of(card)] if card else [], as_json, quiet)
        gates.refuse_failed(result)
        record.refuse_declined(result)

    streams.present(result, as_json, comparison.show, finish, allow_nan=False)
