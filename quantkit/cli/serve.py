"""`quantkit serve`: hand a checkpoint over to an engine's own server."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from quantkit.cli import flags

EPILOG = """Examples:

  quantkit serve ./model                       (the engine follows from the layout and from what is here)

  quantkit serve ./model.gguf --port 8080 --ctx 4096 --parallel 8

  quantkit serve ./model --print               (the engine's own command, and nothing is started)

  quantkit serve ./model --check --port 0      (start, ask for one completion, stop: for CI)

  QUANTKIT_API_KEY=… quantkit serve ./model-gptq --engine vllm --host 0.0.0.0

  quantkit serve ./model -- --log-level info   (what follows -- is the engine's)"""
ENGINE, FIT = "Engine", "Size"


def command(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id.")],
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- …]", help="Further arguments for the engine.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm, llama.cpp or transformers. (default: what loads the layout and is here)",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="QUANTKIT_API_KEY",
            show_envvar=True,
            help="Key that requests must bring. Other users of the machine see flags, not variables.",
        ),
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of a sequence, such as 8192 or 32k. (default: the model's, on a CPU at most 8192, "
            "and what fits)",
            rich_help_panel=FIT,
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            help="Sequences at once. (default: the engine's usual, if they fit)", rich_help_panel=FIT
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision of the KV cache: fp16, bf16, fp8, q8_0, q4_0, as the engine has it.",
            rich_help_panel=FIT,
        ),
    ] = None,
    memory_fraction: Annotated[
        float,
        typer.Option(
            help="Share of the device's memory for weights and cache; of a CPU's what is free.",
            rich_help_panel=FIT,
        ),
    ] = 0.9,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, cuda:N or mps; auto: what the engine takes by itself.", rich_help_panel=ENGINE
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(help="float32, bfloat16 or float16; auto: as stored.", rich_help_panel=ENGINE),
    ] = "auto",
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the engine's command on one line, and start nothing.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Stop after the first completion: exit code 0 if there was one.")
    ] = False,
    start_timeout: Annotated[float, typer.Option(help="Seconds until it must be healthy.")] = 900.0,
    revision: flags.REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Neither progress nor the engine's own words.")
    ] = False,
) -> None:
    """The function behind `quantkit serve`."""
    from quantkit.capacity.source import parse_tokens
    from quantkit.cli.manners import stopping
    from quantkit.cli.progress import listener
    from quantkit.models import kv_types
    from quantkit.serving.server.settings import Settings

    settings = Settings(
        engine=engine,
        host=host,
        port=port,
        api_key=api_key,
        ctx=None if ctx is None else parse_tokens(ctx),
        parallel=parallel,
        kv_dtype=None if kv_dtype is None else kv_types.named(kv_dtype),
        device=device,
        dtype=dtype,
        memory_fraction=memory_fraction,
        trust_remote_code=trust_remote_code,
        start_seconds=start_timeout,
        extra=tuple(extra or ()),
    )
    with listener(quiet) as progress:
        from quantkit.serving.server.hand_over import prepare

        prepared = prepare(model, settings, revision, offline, progress, fetch=not print_only)
        for warning in prepared.warnings:
            progress.warn(warning)
    if print_only:
        print(json.dumps(prepared.record(), indent=2) if as_json else prepared.command.line())
        return
    with stopping() as asked:
        try:
            _serve(prepared, check, as_json, quiet)
        except BaseException:
            if not asked:
                raise
            if not quiet:
                print(f"stopped {prepared.offer.engine}", file=sys.stderr)
            raise SystemExit(asked[0]) from None  # of typer.Exit(130) an `error: interrupted` would be made


def _serve(prepared: Any, check: bool, as_json: bool, quiet: bool) -> None:
    """Until it ends, or is ended."""
    from quantkit.cli.progress import Lines, Quiet
    from quantkit.serving.server import hand_over, printed

    output = None if quiet else sys.stderr.buffer
    progress = Quiet() if quiet else Lines()  # no bar: the engine writes to the same terminal
    try:
        if not quiet:
            printed.announce(prepared)
        with hand_over.serving(prepared, progress, output) as (engine, proof):
            progress.close()
            if as_json:
                print(json.dumps(prepared.record(proof), indent=2), flush=True)
            else:
                printed.ready(prepared, proof, staying=not check)
            if check:
                return
            code = engine.wait()
            raise hand_over.ended(prepared, engine, code)
    finally:
        progress.close()
