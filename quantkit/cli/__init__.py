"""The command line: data goes to stdout, everything else to stderr. Commands contain no logic."""

import os
import sys

import typer

from quantkit import __version__
from quantkit.cli import commands, ranks, running

EPILOG = f"""Examples:
  quantkit plan org/name --gpu rtx-3090     # will it fit? loads nothing
  quantkit gptq ./model               # 4 bit, the shipped calibration text
  quantkit gptq ./model --dry-run     # the plan: memory and disk
  quantkit run gptq-w3 ./model        # a recipe; see quantkit recipes list
  quantkit eval ./model ./model-gptq-w4g128 --text test.txt
{running.exit_codes()}""".replace("\n", "\n\n")  # a paragraph for each line

app = typer.Typer(
    cls=commands.Root,
    help="Compress language models and measure what the compression cost.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    ranks.refuse_letters()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Idle threads sleep instead of spinning: five times faster where another job shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Put large tensors on large pages where Linux has them: page faults took a fifth of a data-free job.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints its start and stop
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")


def main() -> None:
    """Entry point of the console script."""
    running.run(app)
