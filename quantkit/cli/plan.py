"""`quantkit plan`: will it fit, how fast can it be, and what does quantizing it take."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quantkit.cli import flags

EPILOG = """Examples:

  quantkit plan ./model --gpu rtx-3090

  quantkit plan org/name --gpu a100-40g --ctx 32768 --kv-dtype fp8     (headers only are fetched)

  quantkit plan --params 70B --vram 48 --bandwidth 960

  quantkit plan config.json --params 671B-A37B --gpu h200 --gpus 8     (of a family that is not known)

  quantkit plan org/name --gpu h100-80g --ranks 8     (memory and time of each of 8 processes)

  quantkit plan ./model --gpu h100-80g --method gptq --json"""
DEVICE, SERVING, JOB = "Device", "Serving", "Quantizing"


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, GGUF file, config.json or hub id; nothing is loaded."),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT",
            help="Parameters instead of a model, or beside a config.json that does not tell them: 175B, "
            "1.5e9, or 30B-A3B where 3B of them are active.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A known one: a100-40g, rtx-3090, l4, m3-max, cpu … (a wrong name lists all).",
            rich_help_panel=DEVICE,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="So many of them as one, as tensor parallelism has it at best: an upper bound.",
            rich_help_panel=DEVICE,
        ),
    ] = None,
    vram: Annotated[float | None, typer.Option(help="Its memory in GiB.", rich_help_panel=DEVICE)] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Its memory bandwidth in GB/s.", rich_help_panel=DEVICE)
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Its dense 16-bit TFLOPS.", rich_help_panel=DEVICE)
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens per sequence, such as 8192 or 32k (32,768). (default: 4096, at most the model's)",
            rich_help_panel=SERVING,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=SERVING)] = 1,
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Precision of the KV cache: bf16, fp16, fp32, fp8, int8, int4, q8_0, q4_0. What each "
            "costs in quality: quantkit eval --kv-dtype.",
            rich_help_panel=SERVING,
        ),
    ] = "bf16",
    method: Annotated[
        str | None,
        typer.Option(
            help="Format that requests_that_fit and roofline of --json are for: bf16, int8, nf4, gptq, awq, "
            "a GGUF file type, or stored. (default: stored where that is quantized, else bf16)",
            rich_help_panel=SERVING,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Calibration sequences.", rich_help_panel=JOB)] = 128,
    seqlen: Annotated[int, typer.Option(help="Tokens per calibration sequence.", rich_help_panel=JOB)] = 512,
    ranks: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="So many processes at the job, as torchrun starts them: what each takes. On the CPU they "
            "share this machine.",
            rich_help_panel=JOB,
        ),
    ] = 1,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    offline: flags.OFFLINE = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only figures and warnings, no explanations.")
    ] = False,
) -> None:
    """The function behind `quantkit plan`."""
    from quantkit.capacity import devices, forecast, names, source, tables
    from quantkit.errors import USAGE, QuantkitError
    from quantkit.models import kv_types

    if model is None and params is None:
        raise QuantkitError(
            "give a model or --params",
            "for example: quantkit plan ./model, or quantkit plan --params 7B",
            USAGE,
        )
    count = None if params is None else source.parse_count(params)
    question = forecast.Question(
        tokens=None if ctx is None else source.parse_tokens(ctx),
        batch=batch,
        kv_dtype=kv_types.named(kv_dtype),
        method=None if method is None else names.format(method),
        device=devices.choose(gpu, vram, bandwidth, tflops, gpus),
        samples=samples,
        seqlen=seqlen,
        ranks=ranks,
    )
    known = source.of_count(count) if model is None else source.read(model, revision, offline, count)
    record = forecast.of_source(known, question)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        tables.show(record, quiet)
