"""Show what a checkpoint contains and which clients load it.

Examples:
  quantkit inspect ./model-gptq-w4g128
  quantkit inspect org/name                   # a hub id: its headers only
  quantkit inspect ./model.gguf --deep        # reads every value, too
  quantkit inspect ./model ./model-gptq-w4g128     # largest differences
"""

from functools import partial
from typing import Any

from quantkit.cli import flags, streams
from quantkit.errors import refuse_problems


@flags.command(shared=("threads", *flags.OPENING), helps=flags.FIRST_REVISION)
def command(
    path: flags.MODEL,
    other: flags.argument(
        "Second checkpoint, to compare weight by weight.", str | None, metavar="[PATH2]"
    ) = None,
    deep: flags.flag("Read and decode all weights, and report NaN and infinities.", bool, "--deep") = False,
    **values: Any,
) -> None:
    from quantkit.inspection import look, show

    opened = values["revision"], values["offline"], values["trust_remote_code"]
    with streams.listener(values["quiet"], computes=False) as progress:
        made, problems = look.at(path, other, deep, *opened, progress.counting)
    shown = show.print_comparison if "models" in made else show.print_record
    streams.present(made, values["as_json"], partial(shown, made), partial(refuse_problems, made, problems))
