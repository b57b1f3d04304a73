"""`quantkit chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli import flags

EPILOG = """Examples:

  quantkit chat ./model-gptq-w4g128

  quantkit chat model-Q4_K_M.gguf --kv-dtype q8_0 --ctx 16384     (through llama.cpp)

  quantkit chat ./model --system "Answer in one sentence." --temperature 0

  quantkit chat ./base-model --raw     (no roles: it goes on from your text)

  printf 'Hello\\nAnd now?\\n' | quantkit chat ./model --json     (a line of JSON per answer)

In the conversation /help lists its commands; Ctrl-C stops an answer, Ctrl-D leaves."""


def command(
    model: Annotated[str, typer.Argument(help="Checkpoint: a folder, a GGUF file or a hub id.")],
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="New tokens per answer at most.")] = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0: the likeliest token, always. Above: sample, the higher the wilder. (default: as the "
            "checkpoint's generation_config.json or GGUF metadata recommend, which is said; else 0)",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from so many of the likeliest tokens only; 0: from all. (default: as recommended)",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the likeliest tokens that together have this probability. (default: as "
            "recommended)",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first answer; each further one has the next.")] = 0,
    context: Annotated[
        str | None,
        typer.Option(
            "--ctx",
            help="Tokens of the conversation at most, such as 8192 or 32k. (default: the "
            "model's, at most 8192)",
            show_default=False,
        ),
    ] = None,
    drop_oldest: Annotated[
        bool, typer.Option("--drop-oldest", help="Forget the oldest turns when the context is full.")
    ] = False,
    load: Annotated[
        Path | None, typer.Option(help="Go on with the last conversation of a file that /save wrote.")
    ] = None,
    template: Annotated[Path | None, typer.Option(help="Use the chat template of this Jinja file.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No roles and no template: the model goes on from your text.")
    ] = False,
    engine: Annotated[
        Literal["auto", "transformers", "llama.cpp"],
        typer.Option(help="auto: llama.cpp for GGUF files where it is installed, else transformers."),
    ] = "auto",
    decoded: Annotated[
        bool, typer.Option("--decoded", help="Decode packed weights even where their kernels are installed.")
    ] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Precision. auto: the checkpoint's where the hardware has it."),
    ] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of llama.cpp's cache: fp16, bf16, fp32, q8_0, q4_0. (default: fp16)"),
    ] = None,
    device: flags.DEVICE = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as the engine chooses.")] = 0,
    revision: flags.REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per answer.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Answers only; no speed and memory, no progress.")
    ] = False,
) -> None:
    """The function behind `quantkit chat`."""
    from quantkit.capacity.source import parse_tokens
    from quantkit.cli.progress import listener, uncollected
    from quantkit.models import kv_types

    cache = None if kv_dtype is None else kv_types.named(kv_dtype)
    limit = parse_tokens(context) if context is not None else 0
    with listener(quiet) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.cli import talk
            from quantkit.serving.chat import start
            from quantkit.serving.chat.conversation import Conversation
            from quantkit.serving.chat.session import Session

        start.sampling({}, tokens, seed, temperature=temperature or 1.0, top_k=top_k, top_p=top_p)
        conversation = Conversation(system, raw)
        if load is not None:
            conversation.load(load)
        progress.phase(f"loading {model}")
        asked = start.Request(
            model, engine, limit, device, dtype, cache, decoded, raw, template, revision, offline,
            trust_remote_code, threads,
        )  # fmt: skip
        started = start.start(asked)
        for warning in started.warnings:
            progress.warn(warning)
        chosen = start.sampling(
            started.recommended, tokens, seed, temperature=temperature, top_k=top_k, top_p=top_p
        )
    session = Session(started.engine, conversation, chosen, drop_oldest)
    try:
        talk.run(session, talk.Terminal(as_json, quiet))
    finally:
        started.engine.close()
