"""`quantkit imatrix`: write an importance matrix for llama-quantize and for quantkit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import flags, running
from quantkit.options import CalibrationOptions, RunOptions

EPILOG = """Examples:

  quantkit imatrix ./model

  quantkit imatrix ./model --calibration text.txt --samples 256 -o model.imatrix.gguf

  llama-quantize --imatrix model.imatrix.gguf model-f16.gguf model-q4.gguf Q4_K_M"""
FORWARD = (
    "dtype",
    "device",
    "batch_size",
    "max_memory",
    "threads",
)  # options of a run that a forward pass uses
OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="GGUF file to write. (default: NAME.imatrix.gguf)"),
]
FIXED = ("dry_run", "overwrite", "revision", "offline", "trust_remote_code", "as_json", "quiet")


def _command() -> Callable[..., None]:
    """Return the function that runs `quantkit imatrix`."""

    def invoke(context: typer.Context, **values: Any) -> None:
        from quantkit.cli.progress import listener, uncollected

        with listener(values["quiet"]) as progress:
            with uncollected():  # after something is seen: torch takes seconds
                from quantkit.cli import job_report
                from quantkit.quantize.calibrate import imatrix_job

            prepared = imatrix_job.prepare(_request(flags.typed(context, values), values), progress)
            with running.done_already(prepared.output, "give it to --imatrix"):
                record = prepared.record() if values["dry_run"] else imatrix_job.run(prepared, progress)
                progress.close()
                if values["as_json"]:
                    print(json.dumps(record, indent=2))
                else:
                    job_report.print_imatrix(record)

    model = Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id, not quantized.")]
    parameters = [flags.parameter("model", model), flags.parameter("output", OUTPUT, None)]
    parameters += flags.of("calibration", CalibrationOptions)
    parameters += flags.of("run", RunOptions, FORWARD)
    parameters += [flags.parameter(name, *flags.FIXED[name]) for name in FIXED]
    return flags.sign(invoke, parameters)


command = _command()


def _request(typed: dict[str, Any], values: dict[str, Any]) -> Any:
    from quantkit.quantize import job

    return job.Request(
        source=values["model"],
        method="imatrix",
        options=None,
        calibration=CalibrationOptions(**_fields(CalibrationOptions, typed)),
        run=RunOptions(**_fields(RunOptions, typed)),
        **{key: values[key] for key in ("output", "revision", "offline", "trust_remote_code", "overwrite")},
    )


def _fields(options: type, typed: dict[str, Any]) -> dict[str, Any]:
    return {name: typed[name] for name in options.__dataclass_fields__ if name in typed}
