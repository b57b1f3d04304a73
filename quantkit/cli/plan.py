"""`quantkit plan`: will it fit, how fast can it be, and what does quantizing it take."""

from __future__ import annotations

import json
from typing import Annotated

import typer

EPILOG = """Examples:

  quantkit plan ./model --gpu rtx-3090

  quantkit plan org/name --gpu a100-40g --ctx 32768 --kv-dtype fp8     (headers only are fetched)

  quantkit plan --params 70B --vram 48 --bandwidth 960

  quantkit plan ./model --gpu h100-80g --method gptq --json"""
DEVICE, SERVING, JOB = "Device", "Serving", "Quantizing"


def command(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder, config.json or hub id; nothing is loaded.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Parameters instead of a model, such as 175B.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A known one: a100-40g, rtx-3090, l4, m3-max, cpu … (a wrong name lists all).",
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
        int | None,
        typer.Option(
            help="Tokens per sequence. (default: 4096, at most the model's)", rich_help_panel=SERVING
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=SERVING)] = 1,
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Precision of the KV cache: bf16, fp16, fp32, fp8, int8, q8_0, q4_0.",
            rich_help_panel=SERVING,
        ),
    ] = "bf16",
    method: Annotated[
        str,
        typer.Option(
            help="Format that requests_that_fit and roofline of --json are for: bf16, int8, nf4, gptq, awq "
            "or a GGUF file type.",
            rich_help_panel=SERVING,
        ),
    ] = "bf16",
    samples: Annotated[int, typer.Option(help="Calibration sequences.", rich_help_panel=JOB)] = 128,
    seqlen: Annotated[int, typer.Option(help="Tokens per calibration sequence.", rich_help_panel=JOB)] = 512,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use the local hub cache only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Memory, cache and speed of a model on a device, and what each job takes: before anything is loaded."""
    from quantkit.capacity import devices, forecast, names, source, tables
    from quantkit.errors import USAGE, QuantkitError

    if (model is None) == (params is None):
        raise QuantkitError(
            "give a model or --params" if model is None else "--params stands for a model: give one of them",
            "for example: quantkit plan ./model, or quantkit plan --params 7B",
            USAGE,
        )
    question = forecast.Question(
        tokens=ctx,
        batch=batch,
        kv_dtype=names.kv_dtype(kv_dtype),
        method=names.format(method),
        device=devices.choose(gpu, vram, bandwidth, tflops),
        samples=samples,
        seqlen=seqlen,
    )
    if params:
        record = forecast.of_count(source.parse_count(params), question)
    else:
        record = forecast.of_source(source.read(model, revision, offline), question)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        tables.show(record)
