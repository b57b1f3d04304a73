"""`quantkit sample`: let a model generate calibration text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli import flags
from quantkit.tables import print_written

EPILOG = """Examples:
  quantkit sample ./model                                   (writes model-own.jsonl)
  quantkit gptq ./model --calibration model-own.jsonl --seqlen 512
  quantkit sample org/model --samples 512 --seqlen 1024 --device cuda -o own.jsonl"""


def command(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSON lines file to write. (default: NAME-own.jsonl)"),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Number of calibration sequences. One in 16, and one more, are spare.")
    ] = 128,
    seqlen: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Sequences generated at once. More are faster and need more memory.")
    ] = 32,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Precision. auto: the model's own if the hardware supports it."),
    ] = "auto",
    device: flags.DEVICE = "auto",
    threads: flags.THREADS = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    revision: flags.REVISION = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """Run `quantkit sample`."""
    from quantkit.cli.progress import listener, uncollected

    with listener(quiet) as progress:
        with uncollected():  # after something is seen: torch takes seconds
            from quantkit.evaluation import generate, self_text
            from quantkit.models.files.open import open_checkpoint
            from quantkit.models.machine.device import choose_device
            from quantkit.quantize.prepare.names import base_name

        output = output or Path(f"{base_name(model)}-own.jsonl")
        self_text.check_output(output, overwrite)
        checkpoint = open_checkpoint(model, revision, offline, trust_remote_code)
        settings = self_text.Settings(samples, seqlen, seed, batch_size)
        place = choose_device(device)
        precision = generate.shared_dtype(dtype, checkpoint, place)
        settings.check(checkpoint)
        listen = partial(progress.counting, "writing text")
        progress.phase(f"loading {checkpoint.source}")
        record = self_text.write(checkpoint, settings, output, precision, place, listen)
    if as_json:
        print(json.dumps(record, indent=2))
        return print_written([output], as_json, quiet)
    spare = f"{samples:,} to calibrate on, {record['texts'] - samples:,} spare"
    print(f"text         {record['texts']:,} sequences, {record['tokens']:,} tokens ({spare})")
    print_written([output])
    options = f"--calibration {record['output']} --samples {samples} --seqlen {seqlen}"
    print(f"\nnext: quantkit gptq {model} {options} -o {base_name(model)}-gptq-own")
