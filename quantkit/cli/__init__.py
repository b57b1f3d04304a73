"""The command line. Commands only wire: flags in, QuantkitError out, data on stdout, the rest on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer

from quantkit import __version__, methods
from quantkit.cli import evaluate, imatrix, quantize, recipes
from quantkit.errors import USAGE, QuantkitError

EPILOG = """Examples:

  quantkit gptq ./model               (4 bit, the shipped calibration text)

  quantkit gptq ./model --dry-run     (what it would do, and what it takes)

  quantkit run gptq-w3 ./model        (a recipe; see quantkit recipes list)

  quantkit eval ./model ./model-gptq-w4g128 --text test.txt"""

UsageError = typer.BadParameter.__base__  # of click, or of the copy that newer Typers carry

app = typer.Typer(
    help="Compress causal language models and show honestly what it cost.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name in methods.available():
    app.command(name, help=methods.load(name).SUMMARY, epilog=quantize.epilog(name))(quantize.command(name))
app.command("run", help="Run the job of a recipe.", epilog=quantize.RUN_EPILOG)(quantize.run_command())
app.add_typer(recipes.app, name="recipes")
app.command("imatrix", help=imatrix.HELP, epilog=imatrix.EPILOG)(imatrix.command())
app.command("eval", epilog=evaluate.EPILOG)(evaluate.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"quantkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print it and exit."
    ),
) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Idle threads sleep instead of spinning: five times faster where another job shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")


def main() -> None:
    """Entry point of the console script."""
    try:  # standalone, Typer would print the parser's errors its own way
        sys.exit(app(prog_name="quantkit", standalone_mode=False))
    except QuantkitError as error:
        _fail(error)
    except UsageError as error:
        if not error.format_message():  # no arguments: the help is the answer, and is printed
            sys.exit(error.exit_code)
        _fail(_parser_error(error))
    except BrokenPipeError:  # the reader of our stdout went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: QuantkitError) -> NoReturn:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)


def _parser_error(error: Any) -> QuantkitError:
    """What the parser refused, in the form of our own errors."""
    near = getattr(error, "possibilities", None)
    words = (error.message if near else error.format_message()).replace("Value error, ", "").split()
    message = " ".join(words).rstrip(".")  # in one line, choices too
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    command = error.ctx.command_path if error.ctx else "quantkit"
    return QuantkitError(message[:1].lower() + message[1:], f"{hint}see {command} --help", USAGE)
