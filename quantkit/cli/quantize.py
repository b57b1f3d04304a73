"""The commands of all methods: read flags, run the job, print the result."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from quantkit.cli import flags, running, streams
from quantkit.models.files import card, headers, hub
from quantkit.quantize import methods
from quantkit.quantize.prepare import recipe
from quantkit.quantize.prepare.request import Request
from quantkit.quantize.staging import may_replace
from quantkit.text import sources

REQUEST = ("revision", "offline", "trust_remote_code", "resume", "overwrite")


def examples(method: str) -> str:
    """Return the examples in the help of a method's command."""
    return f"""Examples:
  quantkit {method} ./model
  quantkit {method} org/name -o ./out --calibration text.txt --seqlen 2048
  quantkit {method} ./model --resume     # after an interruption"""


def command(method: str) -> Callable[..., None]:
    """Return the function that runs `quantkit METHOD`."""
    rows = [row for name, kind in recipe.sections(method).items() for row in flags.of(name, kind)]
    unused = methods.load(method).unused

    @flags.command(*(row for row in rows if row.name not in unused), shared=flags.JOB)
    def invoke(context: typer.Context, model: flags.MODEL, **values: Any) -> None:
        named = values["recipe_name"]
        base = recipe.load(named, method) if named else recipe.Recipe(method)
        run(base, (), context, values | {"model": model})

    return invoke


def _check_early(request: Request, values: dict[str, Any]) -> None:
    """Raise QuantkitError for invalid options, files or outputs, before importing torch takes seconds."""
    request.method.check()
    request.run.check()
    if values["push"]:
        hub.check_target(values["push"], request.offline)
    text = request.calibration.calibration
    if text and text.endswith(sources.FILES):
        with sources.opened(Path(text)):
            pass
    folder = hub.local(request.source)
    if folder and folder.is_dir():
        headers.at(request.source, folder, strict=True)
    named = request.output or request.method.options.group_size is not None  # else it depends on the model
    if named and not (request.overwrite or request.resume or values["dry_run"]):
        may_replace.check_new([single.destination for single in request.each()])


def run(base: recipe.Recipe, settings: Sequence[str], context: typer.Context, values: dict[str, Any]) -> None:
    """Run the jobs of a recipe, changed by `--set` and typed flags."""
    further = {name: values[name] for name in REQUEST}
    request = recipe.merge(base, settings, flags.typed(context, values), **further)
    flags.check_text(values["eval_text"])
    _check_early(request, values)
    with streams.listener(values["quiet"]) as progress:
        from quantkit.cli import job_report
        from quantkit.evaluation import runs
        from quantkit.inspection import publish
        from quantkit.models.machine import distributed
        from quantkit.quantize import job

        outputs, jobs = job.prepare_all(request, progress, values["dry_run"])
        if values["push"] and jobs:
            folder = jobs[0].checkpoint.folder
            head = card.head(card.base_of(request.source, folder), "", folder)
            card.check(head, folder / card.CARD, "use quantkit push after the job; then ")
        if values["dry_run"] and jobs:
            progress.close()
            plans = runs.merged([job_report.plan_record(prepared) for prepared in jobs])
            return streams.present(plans, values["as_json"], lambda: job_report.print_plans(jobs))

        def report(result: runs.Result) -> None:
            progress.close()
            streams.present(result.record(), values["as_json"], lambda: job_report.print_result(result))
            for output in result.outputs if values["push"] and not distributed.rank() else ():
                sent = publish.push(str(output), values["push"], False, None, lambda *_: None)
                print(f"published  {sent['url']}", file=sys.stderr if values["as_json"] else sys.stdout)

        if not jobs:
            return report(runs.Result(outputs, [], finished=True))
        with running.resumable([prepared.staging for prepared in jobs]):
            report(runs.run(jobs, values["eval_text"], progress))
