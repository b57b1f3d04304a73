"""`quantkit inspect`: describe a checkpoint, or compare two."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quantkit.cli import flags
from quantkit.errors import QuantkitError, count

EPILOG = """Examples:
  quantkit inspect ./model-gptq-w4g128
  quantkit inspect org/name                   (a hub id: its headers only)
  quantkit inspect ./model.gguf --deep        (reads every value, too)
  quantkit inspect ./model ./model-gptq-w4g128     (largest differences)"""


def command(
    path: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file or hub id.")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[PATH2]", help="Second checkpoint, to compare weight by weight."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read and decode all weights, and report NaN and infinities.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the first hub id.")] = None,
    threads: flags.THREADS = None,
    offline: flags.OFFLINE = False,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """Run `quantkit inspect`."""
    from quantkit.inspection import record, show
    from quantkit.models.files.headers import open_contents

    sources = [(path, revision)] + ([] if other is None else [(other, None)])
    found = [record.describe(open_contents(*source, offline)) for source in sources]
    made, broken = found[0], _problems(found)
    if deep and broken:
        made["integrity"]["notes"] = ["values were not read: the checkpoint is damaged"]
    elif deep or other is not None:
        made = _with_values(sources, found, deep, (offline, trust_remote_code, quiet))
        broken = _problems(found)
    if not as_json:
        (show.print_comparison if "models" in made else show.print_record)(made)
    if broken:
        more = f" (and {count(len(broken) - 1, 'more problem')})" if len(broken) > 1 else ""
        raise QuantkitError(
            broken[0] + more, "the checkpoint is incomplete or damaged: copy or download it again", found=made
        )
    if as_json:
        print(json.dumps(made, indent=2))


def _problems(found: list[dict[str, Any]]) -> list[str]:
    return [problem for model in found for problem in model["integrity"]["problems"]]


def _with_values(
    sources: list[tuple[str, str | None]],
    found: list[dict[str, Any]],
    deep: bool,
    options: tuple[bool, bool, bool],
) -> dict[str, Any]:
    """Read values: check those of one checkpoint and return its record, or compare two and return that JSON.

    sources: (name, revision) of each. found: their records. options: offline, trust_remote_code and quiet.
    """
    from quantkit.cli.progress import listener
    from quantkit.inspection import values
    from quantkit.models.files.open import open_checkpoint

    offline, trust_remote_code, quiet = options
    try:
        opened = [open_checkpoint(*source, offline, trust_remote_code) for source in sources]
    except QuantkitError as error:
        raise QuantkitError(error.message, error.hint, error.exit_code, found=found[0]) from error
    with listener(quiet) as progress:
        for checkpoint, model in zip(opened, found, strict=True) if deep else ():
            values.check(checkpoint, model, progress.counting)
        if len(opened) == 1:
            return found[0]
        return values.compare(*opened, (found[0], found[1]), progress.counting)
