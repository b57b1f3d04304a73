"""`quantkit verify`: check files, values and errors of a checkpoint against its manifest."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from quantkit.cli import flags, streams
from quantkit.errors import VERIFICATION, count, refuse_problems

EPILOG = """Examples:
  quantkit verify ./model-gptq-w4g128                     (files, values, codes)
  quantkit verify ./model-gptq-w4g128 --base ./model      (and every linear's error, measured again)
  quantkit verify ./model-Q4_K_M.gguf --json"""


def command(
    path: Annotated[str, typer.Argument(help="Checkpoint folder or GGUF file.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Original model: measure the error of every linear again and compare with the manifest.",
        ),
    ] = None,
    threads: flags.THREADS = None,
    trust_remote_code: flags.TRUST_REMOTE_CODE = False,
    as_json: flags.AS_JSON = False,
    quiet: flags.QUIET = False,
) -> None:
    """Run `quantkit verify`."""
    from quantkit.cli.progress import listener, uncollected

    with listener(quiet) as progress:
        with uncollected():  # after the first line of progress: torch takes seconds
            from quantkit.inspection import verify
        record = verify.verify(path, base, progress.counting, trust_remote_code)
    refused = partial(refuse_problems, record, record["problems"], VERIFICATION)
    streams.present(record, as_json, partial(_show, record), refused)


def _show(record: dict[str, Any]) -> None:
    from rich.console import Console

    from quantkit.inspection.show import provenance
    from quantkit.tables import print_facts, print_line

    console = Console(highlight=False, markup=False)
    facts = {"checkpoint": record["source"], "made by": provenance(record["made"])}
    same = sum(row["state"] == "same" for row in record["files"])
    if record["files"]:
        facts["files"] = f"{same} of {len(record['files'])} as written (sha256)"
    if record["linears"]:
        agree = [row for row in record["linears"] if row["agrees"]]
        worst = max(record["linears"], key=lambda row: row["error"])
        facts["errors"] = (
            f"{len(agree)} of {count(len(record['linears']), 'linear')} as far from the source as the "
            f"manifest says; farthest {worst['name']}, {worst['error']:.3g}"
        )
    print_facts(console, {name: fact for name, fact in facts.items() if fact})
    for note in record["notes"]:
        print_line(console, f"note: {note}")
    for problem in record["problems"][1:]:  # the first is the error
        print_line(console, f"wrong: {problem}", "yellow")
    if not record["problems"]:
        print_line(console, "No damage found. Checksums detect corruption, not tampering.")
