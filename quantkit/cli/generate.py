"""Continue a prompt with one or several models, side by side.

Examples:
  quantkit generate ./model-gptq-w4g128 -p "Once upon a time"
  quantkit generate ./model ./model-nf4 ./model-gptq-w4g128 -p "The sea"     # side by side
  quantkit generate org/chat-model -p "What is a Hessian?" --chat -n 200
  echo "The sea" | quantkit generate ./model -p - --json
"""

import sys
from dataclasses import replace
from typing import Any

from quantkit.cli import flags, streams
from quantkit.evaluation.settings import GenerateSettings

OPTIONS = ("prompt", "tokens", "chat", "temperature", "top_k", "top_p", "seed")


@flags.command(
    *flags.of("options", GenerateSettings, OPTIONS),
    shared=("dtype", "device", "threads", *flags.OPENING),
    helps=flags.FIRST_REVISION,
)
def command(models: flags.MODELS, **values: Any) -> None:
    settings = flags.options(GenerateSettings, values)
    if settings.prompt == "-":
        settings = replace(settings, prompt=streams.decoded(sys.stdin.read(), "stdin").rstrip("\n"))
    settings.check()
    as_json, quiet = values["as_json"], values["quiet"]
    live = len(models) == 1 and not as_json and sys.stdout.isatty()
    made: list[Any] = []
    with streams.listener(quiet or live) as progress:
        with streams.uncollected():  # after the first line of progress: torch takes seconds
            from quantkit.cli import continuations
            from quantkit.evaluation import generate
            from quantkit.models.files.open import open_checkpoint
            from quantkit.models.machine.device import choose_device

        opened = values["offline"], values["trust_remote_code"]
        checkpoints = [
            open_checkpoint(model, None if position else values["revision"], *opened)
            for position, model in enumerate(models)
        ]
        device = choose_device(values["device"])
        precision = generate.shared_dtype(values["dtype"], checkpoints[0], device)
        comparable = generate.comparable(checkpoints)
        for warning in generate.warnings(checkpoints, comparable, settings):
            progress.warn(warning)
        for checkpoint, same in zip(checkpoints, comparable, strict=True):
            progress.phase(f"loading and running {checkpoint.source}")
            first = made[0] if made and same else None
            stream = continuations.stream(settings) if live else None
            made.append(generate.continue_prompt(checkpoint, settings, precision, device, first, stream))
    record = generate.record(settings, precision, device, made)
    streams.present(record, as_json, lambda: continuations.show(settings, made, live))
    if not as_json and not quiet:
        continuations.show_speed(made, precision, device)
