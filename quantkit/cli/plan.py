"""Estimate memory, speed and job times from headers, before anything is loaded.

Examples:
  quantkit plan ./model --gpu rtx-3090
  quantkit plan org/name --gpu a100-40g --ctx 32768 --kv-dtype fp8     # headers only are fetched
  quantkit plan --params 70B --vram 48 --bandwidth 960
  quantkit plan --params 671B-A37B --gpu h200 --gpus 8     # 37 of 671 billion parameters are active
  quantkit plan ./model --gpu h100-80g --format IQ2_XXS
"""

from typing import Any

from quantkit.capacity.question import Question
from quantkit.cli import flags, streams

PANELS = {
    "device": ("gpu", "gpus", "vram", "bandwidth", "tflops"),
    "serving": ("ctx", "batch", "kv_dtype", "format"),
    "quantizing": ("samples", "seqlen", "threads"),
}


@flags.command(*flags.by_panel(PANELS, Question), shared=("revision", "offline", "as_json", "quiet"))
def command(
    model: flags.argument("Folder, GGUF file, config.json or hub id.", str | None) = None,
    params: flags.flag(
        "Number of parameters, instead of a model: 175B, 1.5e9, or 30B-A3B if 3B of them are active.",
        metavar="COUNT",
    ) = None,
    **values: Any,
) -> None:
    from quantkit.capacity import forecast, show

    question = flags.options(Question, values)
    record = forecast.answer(model, params, question, values["revision"], values["offline"])
    one_format = question.format is not None
    streams.present(record, values["as_json"], lambda: show.show(record, values["quiet"], one_format))
