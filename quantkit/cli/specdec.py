"""Measure whether speculative decoding pays, and with which draft model.

Examples:
  quantkit specdec ./model ./model-nf4
  quantkit specdec ./model ./small-model prompt-lookup --prompt-text novel.txt     # side by side
  quantkit specdec ./model ./model-gptq-w2 --k 1,2,3,4,6 --tokens 128 --json
  quantkit specdec ./model ./model-nf4 --temperature 1     # sampled text
"""

from functools import partial
from typing import Any

from quantkit.cli import flags, streams
from quantkit.errors import USAGE, require
from quantkit.serving.specdec.settings import SpecdecSettings


@flags.command(*flags.of("options", SpecdecSettings))
def command(
    target: flags.argument("The model to make faster: checkpoint folder, GGUF file or hub id."),
    drafts: flags.argument(
        "Draft models with the same vocabulary: a compressed copy of the target, a smaller model, or "
        "prompt-lookup, which copies from the text so far.",
        list[str] | None,
        metavar="DRAFT…",
    ) = None,
    **values: Any,
) -> None:
    require(drafts, "no DRAFT is given", f"for example: quantkit specdec {target} prompt-lookup", USAGE)
    settings, quiet = flags.options(SpecdecSettings, values), values["quiet"]
    settings.check()
    with streams.listener(quiet) as progress:
        from quantkit.models.files.open import open_checkpoint
        from quantkit.serving.specdec import measure, show
        from quantkit.serving.specdec.settings import LOOKUP

        trusted = values["offline"], values["trust_remote_code"]
        checkpoint = open_checkpoint(target, values["revision"], *trusted)
        guesses = [None if draft == LOOKUP else open_checkpoint(draft, None, *trusted) for draft in drafts]
        record = measure.compare(checkpoint, guesses, settings, progress)
    shown = partial(show.show, record, checkpoint.tokenizer, quiet)
    refused = partial(measure.refuse_unlike, record)
    streams.present(record, values["as_json"], shown, refused, default=str, allow_nan=False)
