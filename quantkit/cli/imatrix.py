"""`quantkit imatrix`: write an importance matrix for llama-quantize and for quantkit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import flags, running, streams
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.tables import print_written

EPILOG = """Examples:
  quantkit imatrix ./model
  quantkit imatrix ./model --calibration text.txt --samples 256 -o model.imatrix.gguf
  llama-quantize --imatrix model.imatrix.gguf model-f16.gguf model-q4.gguf Q4_K_M"""
MODEL = Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id, not quantized.")]
FORWARD = ("dtype", "device", "batch_size", "max_memory", "threads")  # options that a forward pass uses
REQUEST = ("output", "revision", "offline", "trust_remote_code", "overwrite")
OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="GGUF file to write. (default: NAME.imatrix.gguf)"),
]
FIXED = ("dry_run", "overwrite", "revision", "offline", "trust_remote_code", "as_json", "quiet")


def _imatrix(context: typer.Context, **values: Any) -> None:
    """Run `quantkit imatrix`."""
    from quantkit.cli.progress import listener, uncollected

    with listener(values["quiet"]) as progress:
        with uncollected():  # after the first output, because torch takes seconds
            from quantkit.cli import job_report
            from quantkit.quantize import job
            from quantkit.quantize.prepare import imatrix_job

        typed = flags.typed(context, values)
        chosen = (flags.options(kind, typed) for kind in (CalibrationOptions, RunOptions))
        further = {name: values[name] for name in REQUEST}
        request = job.Request(values["model"], None, *chosen, **further)
        prepared = imatrix_job.prepare(request, progress)
        with running.done_already(prepared.output, "give it to --imatrix"):
            record = prepared.record() if values["dry_run"] else imatrix_job.run(prepared, progress)
            progress.close()
            streams.present(record, values["as_json"], lambda: job_report.print_imatrix(record))
            if not values["dry_run"]:
                print_written([prepared.output], values["as_json"], values["quiet"])


command = flags.sign(
    _imatrix,
    [
        flags.parameter("model", MODEL),
        flags.parameter("output", OUTPUT, None),
        *flags.of("calibration", CalibrationOptions),
        *flags.of("run", RunOptions, FORWARD),
        *flags.fixed(FIXED),
    ],
)
