"""`quantkit specdec`: does speculative decoding pay for this target and this draft?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli import flags

EPILOG = """Examples:

  quantkit specdec ./model ./model-nf4

  quantkit specdec ./model ./small-model prompt-lookup --text novel.txt     (side by side)

  quantkit specdec ./model ./model-gptq-w2 --k 1,2,3,4,6 --tokens 128 --json

  quantkit specdec ./model ./model-nf4 --temperature 1 --proof 20000     (and prove the distribution)

  quantkit specdec model-F16.gguf model-Q4_K_M.gguf     (both run by llama.cpp where it is installed)"""
TEXT, PROOF = "Texts", "Sampling"


def command(
    target: Annotated[str, typer.Argument(help="The checkpoint whose text is wanted.")],
    drafts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DRAFT…",
            help="Checkpoints of the same vocabulary: a compressed copy of the target or a smaller model; or "
            "prompt-lookup, which copies from the text so far.",
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", metavar="LIST", help="Tokens drafted for each pass.")] = "1,2,4,8",
    text: Annotated[
        Path | None,
        typer.Option(help="Text that prompts are cut from. (default: shipped text)", rich_help_panel=TEXT),
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many.", rich_help_panel=TEXT)] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=TEXT)] = 64,
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", help="New tokens of each, at most.", rich_help_panel=TEXT)
    ] = 64,
    repeats: Annotated[int, typer.Option(help="Of every run; the median counts.")] = 3,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token, always. Above: sample.", rich_help_panel=PROOF)
    ] = 0.0,
    proof: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Draw at least so many for the test of the distribution. (default: what is measured)",
            rich_help_panel=PROOF,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    engine: Annotated[
        Literal["auto", "transformers", "llama.cpp"],
        typer.Option(help="auto: llama.cpp where all are GGUF files and it is installed."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Precision of all models. auto: the target's where the hardware has it."),
    ] = "auto",
    device: flags.DEVICE = "auto",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the target's hub id.")
    ] = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """The function behind `quantkit specdec`."""
    from quantkit.cli.progress import listener, uncollected
    from quantkit.errors import USAGE, QuantkitError

    if not drafts:
        raise QuantkitError(
            "no DRAFT is given", f"for example: quantkit specdec {target} prompt-lookup", USAGE
        )
    with listener(quiet) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.evaluation.generate import shared_dtype
            from quantkit.models.files.open import open_checkpoint
            from quantkit.models.machine.device import choose_device
            from quantkit.serving.engines.choose import choose_local
            from quantkit.serving.specdec import compare, printed
            from quantkit.serving.specdec.settings import LOOKUP, Settings, parse_ks

        settings = Settings(
            parse_ks(k), text, prompts, prompt_tokens, tokens, repeats, temperature, seed, proof
        )
        settings.check()
        own = open_checkpoint(target, revision, offline, trust_remote_code)
        guesses = [
            None if draft == LOOKUP else open_checkpoint(draft, None, offline, trust_remote_code)
            for draft in drafts
        ]
        place = choose_device(device)
        precision = shared_dtype(dtype, own, place)
        folders = [made.source for made in (own, *guesses) if made and not made.folder.is_file()]
        runs, _ = choose_local(engine, folders)
        found = compare.compare(own, guesses, settings, runs, precision, place, progress)
    if not as_json:
        printed.show(found, own.tokenizer, quiet)
    found.refuse_unlike()
    if as_json:
        print(json.dumps(found.record(), indent=2, default=str, allow_nan=False))
