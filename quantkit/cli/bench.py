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

  quantkit bench ./model.gguf --engine llama.cpp,transformers --json

  quantkit bench ./model --attn eager,sdpa --prompt 256,1024,4096     (time and memory of attention)

  quantkit bench ./model --batching static,dynamic,continuous --requests 64 --rate 4

  quantkit bench --url http://127.0.0.1:8000     (a server under load, this machine's)"""
RUN, ENGINE, OTHERS = "What is run", "Engine", "Other questions"


def command(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, GGUF files or hub ids; the first is what the others are compared to."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Sequences at once, such as 1,4,16. (default: 1)", rich_help_panel=RUN
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Prompt tokens of each, such as 128,512. (default: 128)", rich_help_panel=RUN
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", "-n", help="New tokens of each sequence. (default: 64)", rich_help_panel=RUN
        ),
    ] = None,
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
    attn: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Time and memory of one model's attention at growing prompts, instead: eager, sdpa, "
            "flash_attention_2 …",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    beyond: Annotated[
        bool,
        typer.Option(
            "--beyond",
            help="Let prompts of --attn be longer than the model was made for: their speed is real.",
            rich_help_panel=OTHERS,
        ),
    ] = False,
    batching: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="One model serving a trace of requests, instead: static, dynamic, continuous.",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The trace: JSON lines of arrival, prompt_tokens, output_tokens. (default: random)",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    lengths: Annotated[
        tuple[str, str],
        typer.Option(
            metavar="PROMPT OUTPUT",
            help="Token counts to draw: fixed:N, uniform:A-B, geometric:MEAN or lognormal:MEDIAN,SIGMA.",
            rich_help_panel=OTHERS,
        ),
    ] = ("uniform:16-128", "geometric:32"),
    url: Annotated[
        str | None,
        typer.Option(help="An OpenAI endpoint under load, instead.", rich_help_panel=OTHERS),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Users of --url, level by level. (default: 1,2,4,8,16,32)",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Of the trace (default: 32), or of each level of --url (default: 4 a user).",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second on average. (default: 8 in a trace; --url: as fast as the users can)",
            rich_help_panel=OTHERS,
        ),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model of --url.", rich_help_panel=OTHERS)
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Of --url.", rich_help_panel=OTHERS)] = None,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Let --url be another machine than this one.", rich_help_panel=OTHERS),
    ] = False,
    html: flags.HTML = None,
    plot: flags.PLOT = None,
    revision: flags.FIRST_REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """The function behind `quantkit bench`."""
    from quantkit.cli import bench_modes
    from quantkit.cli.progress import listener
    from quantkit.errors import USAGE, QuantkitError
    from quantkit.evaluation.comparison.files import Outputs
    from quantkit.serving.bench import settings as asked

    outputs = Outputs(html, plot)
    if (attn is not None) + (batching is not None) + (url is not None) > 1:
        hint = "one question at a time"
        raise QuantkitError("--attn, --batching and --url exclude each other", hint, USAGE)
    question = "attn" if attn else "batching" if batching else "url" if url else ""
    bench_modes.refuse_others(question, flags.typed(context, context.params))
    shared = bench_modes.Asked(
        tuple(models or ()), batch, prompt, tokens, repeats, seed, threads, dtype, device, revision, offline,
        trust_remote_code, outputs, as_json, quiet,
    )  # fmt: skip
    if url is not None:
        told = {"model": served_model, "api_key": api_key, "remote": remote}
        return bench_modes.endpoint(shared, url, concurrency, requests, rate, **told)
    if not models:
        raise QuantkitError("give a model", "for example: quantkit bench ./model ./model-nf4", USAGE)
    if attn is not None:
        return bench_modes.attention(shared, attn, beyond)
    if batching is not None:
        drawn = (32 if requests is None else requests, 8.0 if rate is None else rate, lengths)
        return bench_modes.batching(shared, batching, trace, *drawn)
    settings = asked.Settings(
        batches=asked.parse_list("--batch", "1" if batch is None else batch),
        prompts=asked.parse_list("--prompt", "128" if prompt is None else prompt),
        tokens=64 if tokens is None else tokens,
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

    from quantkit.serving.bench import quality as quality_of
    from quantkit.serving.bench import run
    from quantkit.serving.bench.figures import figures
    from quantkit.serving.bench.page import page
    from quantkit.serving.bench.table import show

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
    run.refuse_empty(result)  # with --json the record goes with the error
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    outputs.write(result, page, figures)
