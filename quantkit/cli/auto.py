"""Search the bits of every linear for the least loss within a size or a loss.

Examples:
  quantkit auto ./model --bpw 3.5
  quantkit auto ./model --max-size 4GB --engine llama.cpp
  quantkit auto ./model --max-kld 0.02 --engine transformers --text test.txt
  quantkit auto ./model --bpw 4.25 --sensitivities table.json     # measured once, used for any budget
  quantkit auto ./model --bpw 3.5 --recipe-out best.yaml && quantkit run best.yaml     # the same, unsearched

Never worse: the result is kept only if it beats the best uniform preset of its size on held-out text.
"""

from typing import Any

import typer

from quantkit.auto.options import AutoOptions, AutoRequest
from quantkit.cli import flags, running, streams
from quantkit.errors import refusal
from quantkit.options import CalibrationOptions, RunOptions
from quantkit.quantize.prepare import recipe
from quantkit.quantize.staging import may_replace
from quantkit.tables import print_written

RUN = (
    "exclude", "experts", "allow_unread", "dtype", "device", "batch_size", "sequential", "states", "threads",
    "max_shard_gb",
)  # fmt: skip


@flags.command(
    *flags.of("budget", AutoOptions),
    *flags.of("calibration", CalibrationOptions),
    *flags.of("run", RunOptions, RUN),
    shared=("output", "dry_run", "resume", "overwrite", *flags.OPENING),
    helps={"output": "Output folder, or GGUF file. (default: MODEL-auto-3.5bpw)"},
)
def command(context: typer.Context, model: flags.UNQUANTIZED, **values: Any) -> None:
    typed, dry_run = flags.typed(context, values), values["dry_run"]
    names = [name for name in (*CalibrationOptions.__dataclass_fields__, *RUN) if name in typed]
    shared = recipe.of_options("gptq", {name: typed[name] for name in names})
    options = flags.options(AutoOptions, typed)
    asked = {"source": model, "options": options, "typed": shared.values}
    request = flags.options(AutoRequest, values | asked)
    options.check()
    if not (request.overwrite or request.resume or dry_run):
        may_replace.check_new([request.destination])
    with streams.listener(values["quiet"]) as progress:
        from quantkit.auto import cost, job, run, show

        prepared = job.prepare(request, progress, dry_run)
        if dry_run:
            record = run.plan_record(prepared) | {"refused": refusal(prepared.check_output)}
            if note := cost.note(prepared):
                progress.warn(note)
        else:
            with running.resumable([prepared.staging], kept=lambda: run.kept(prepared)):
                record = run.run(prepared, progress)
    streams.present(record, values["as_json"], lambda: show.print_record(record))
    if "kept" in record:
        extra = options.recipe_out, None if record["sensitivities_read"] else options.sensitivities
        print_written(filter(None, extra), values["as_json"], values["quiet"])
