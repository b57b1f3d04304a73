"""`quantkit generate`: continue one prompt with several checkpoints."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import typer

from quantkit.cli import flags, streams

EPILOG = """Examples:
  quantkit generate ./model-gptq-w4g128 -p "Once upon a time"
  quantkit generate ./model ./model-nf4 ./model-gptq-w4g128 -p "The sea"     (side by side)
  quantkit generate org/chat-model -p "What is a Hessian?" --chat -n 200
  echo "The sea" | quantkit generate ./model -p - --json"""


def command(
    models: flags.MODELS,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; - reads stdin.")],
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="New tokens, at most.")] = 64,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="0: always the most likely token. Above: sample; higher is more random.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens that together have this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Precision of all models. auto: the first model's if the hardware supports it."),
    ] = "auto",
    device: flags.DEVICE = "auto",
    threads: flags.THREADS = None,
    revision: flags.FIRST_REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """Run `quantkit generate`."""
    from quantkit.cli.progress import listener, uncollected

    text = streams.decoded(sys.stdin.read(), "stdin").rstrip("\n") if prompt == "-" else prompt
    live = len(models) == 1 and not as_json and sys.stdout.isatty()
    made: list[Any] = []
    with listener(quiet or live) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.cli import continuations
            from quantkit.evaluation import generate
            from quantkit.models.files.open import open_checkpoint
            from quantkit.models.machine.device import choose_device

        settings = generate.Settings(tokens, temperature, seed, top_k, top_p, prompt=text, chat=chat)
        settings.check()
        checkpoints = [
            open_checkpoint(model, revision if position == 0 else None, offline, trust_remote_code)
            for position, model in enumerate(models)
        ]
        place = choose_device(device)
        precision = generate.shared_dtype(dtype, checkpoints[0], place)
        comparable = generate.comparable(checkpoints)
        for warning in generate.warnings(checkpoints, comparable, settings):
            progress.warn(warning)
        for checkpoint, same in zip(checkpoints, comparable, strict=True):
            progress.phase(f"loading and running {checkpoint.source}")
            first = made[0] if made else None
            stream = continuations.stream(settings) if live else None
            made.append(generate.continue_prompt(checkpoint, settings, precision, place, first, same, stream))
    if as_json:
        print(json.dumps(generate.record(settings, precision, place, made), indent=2))
    else:
        continuations.show(settings, made, streamed=live)
        if not quiet:
            continuations.show_speed(made, precision, place)
