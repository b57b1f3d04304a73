"""`quantkit bench`: what checkpoints cost to run, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli import flags

EPILOG = """Examples:

  quantkit bench ./model ./model-nf4 ./model-Q4_K_M.gguf

  quantkit bench ./model ./model-nf4 --batch 1,4,16 --prompt 128,512 --tokens 64

  quantkit bench ./model ./model-nf4 --quality result.json     (of quantkit eval … --json > result.json)

  quantkit bench ./model --batch 1,2,4,8,16,32 --plot roofline.svg     (the roofline over it)

  quantkit bench ./model.gguf --engine llama.cpp,transformers --json"""
RUN, ENGINE = "What is run", "Engine"


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, GGUF files or hub ids; the first is what the others are compared to."),
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="LIST", help="Sequences at once, such as 1,4,16.", rich_help_panel=RUN)
    ] = "1",
    prompt: Annotated[
        str, typer.Option(metavar="LIST", help="Prompt tokens of each, such as 128,512.", rich_help_panel=RUN)
    ] = "128",
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", help="New tokens of each sequence.", rich_help_panel=RUN)
    ] = 64,
    repeats: Annotated[int, typer.Option(help="Measured runs in a round.", rich_help_panel=RUN)] = 3,
    rounds: Annotated[
        int,
        typer.Option(help="Times that every model has its turn, in a new process.", rich_help_panel=RUN),
    ] = 2,
    warmup: Annotated[int, typer.Option(help="Runs before those, not measured.", rich_help_panel=RUN)] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.", rich_help_panel=RUN)] = 0,
    engine: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="auto, transformers, llama.cpp, llama-bench or vllm, or several. auto: llama.cpp for GGUF "
            "files where it is installed, else transformers.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto",
    decoded: Annotated[
        bool,
        typer.Option(
            "--decoded",
            help="In transformers, compute with decoded weights, not with the layout's own kernels.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of the CPU, for every engine. (default: OMP_NUM_THREADS, else the cores)",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            help="Precision in transformers and vLLM. auto: each checkpoint's own where the hardware has it.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto",
    device: flags.DEVICE = "auto",
    quality: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Of quantkit eval --json: KL divergence and perplexity beside the speed. Repeatable.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page of it.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plots: .svg, or .png. All but the first get a suffix."),
    ] = None,
    revision: flags.FIRST_REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """The function behind `quantkit bench`."""
    from quantkit.cli.progress import listener
    from quantkit.errors import USAGE, QuantkitError
    from quantkit.serving.bench import settings as asked

    if not models:
        raise QuantkitError("give a model", "for example: quantkit bench ./model ./model-nf4", USAGE)
    settings = asked.Settings(
        batches=asked.parse_list("--batch", batch),
        prompts=asked.parse_list("--prompt", prompt),
        tokens=tokens,
        repeats=repeats,
        rounds=rounds,
        warmup=warmup,
        seed=seed,
        threads=asked.usual_threads() if threads is None else threads,
        dtype=dtype,
        device=device,
        decoded=decoded,
        trust_remote_code=trust_remote_code,
    )
    settings.check()

    from quantkit.evaluation.comparison.files import Outputs
    from quantkit.serving.bench import quality as quality_of
    from quantkit.serving.bench import run
    from quantkit.serving.bench.figures import figures
    from quantkit.serving.bench.page import page
    from quantkit.serving.bench.table import show

    outputs = Outputs(html, plot)
    outputs.check()
    evaluated = quality_of.read(quality or ())
    with listener(quiet) as progress:
        rows = run.rows(models, engine, settings, revision, offline)
        for row in rows:
            if row.note:
                progress.warn(f"{row.subject.source} runs in {row.engine}: {row.note}")
        run.measure(rows, settings, progress)
    result = run.record(rows, settings, evaluated)
    if not as_json:
        show(result, quiet)
    outputs.write(result, page, figures)
    run.refuse_empty(result)  # with --json the record goes with the error
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
