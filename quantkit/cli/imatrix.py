"""Write an importance matrix for llama-quantize.

Examples:
  quantkit imatrix ./model
  quantkit imatrix ./model --calibration text.txt --samples 256 -o model.imatrix.gguf
  llama-quantize --imatrix model.imatrix.gguf model-f16.gguf model-q4.gguf Q4_K_M
"""

from typing import Any

from quantkit.cli import flags, streams
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.tables import print_written

FORWARD = ("dtype", "device", "batch_size", "max_memory", "threads")  # options that a forward pass uses


@flags.command(
    *flags.of("calibration", CalibrationOptions),
    *flags.of("run", RunOptions, FORWARD),
    shared=("output", "dry_run", "overwrite", *flags.OPENING),
    helps={"output": "GGUF file to write. (default: NAME.imatrix.gguf)"},
)
def command(model: flags.UNQUANTIZED, **values: Any) -> None:
    with streams.listener(values["quiet"]) as progress:
        from quantkit.cli import job_report
        from quantkit.quantize import job
        from quantkit.quantize.prepare import imatrix_job

        asked = {"source": model, "method": None, "run": flags.options(RunOptions, values)}
        asked |= {"calibration": flags.options(CalibrationOptions, values)}
        request = flags.options(job.Request, values | asked)
        prepared = imatrix_job.prepare(request, progress, values["dry_run"])
        plan = prepared.record() | {"refused": prepared.refused}
        record = plan if values["dry_run"] else imatrix_job.run(prepared, progress)
    streams.present(record, values["as_json"], lambda: job_report.print_imatrix(record, prepared.checkpoint))
    if not values["dry_run"]:
        print_written([prepared.output], values["as_json"], values["quiet"])
