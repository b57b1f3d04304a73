"""`quantkit recipes`: list and show shipped recipes, and create new ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from quantkit.cli import flags
from quantkit.errors import USAGE, QuantkitError
from quantkit.quantize import methods
from quantkit.quantize.prepare import recipe
from quantkit.tables import print_written

app = typer.Typer(
    add_completion=False,
    epilog="""Examples:

  quantkit recipes list

  quantkit recipes show gptq-w4 > mine.yaml

  quantkit recipes init gptq -o mine.yaml     (every option, with its help)""",
    no_args_is_help=True,
)

AS_JSON = Annotated[bool, typer.Option("--json", help="Print them as JSON.")]
NAME = Annotated[
    str,
    typer.Argument(help="A shipped recipe, or a YAML file.", autocompletion=flags.completion(recipe.shipped)),
]
METHOD = Annotated[
    str,
    typer.Argument(
        help="Method whose options are written.", autocompletion=flags.completion(methods.available)
    ),
]
FILE = Annotated[Path | None, typer.Option("--output", "-o", help="File to write. (default: METHOD.yaml)")]


@app.command("list", epilog="Examples:\n\n  quantkit recipes list --json")
def list_command(as_json: AS_JSON = False) -> None:
    """List the recipes that come with quantkit."""
    recipes = [recipe.load(name) for name in recipe.shipped()]
    if as_json:
        records = [{"name": r.name, "method": r.method, "description": r.description} for r in recipes]
        print(json.dumps({"schema": "quantkit.recipes/1", "recipes": records}, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "method", "description", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[:2]:
        column.no_wrap = True
    for shipped in recipes:
        table.add_row(shipped.name, shipped.method, shipped.description)
    Console(highlight=False, markup=False).print(table)


@app.command("show", epilog="Examples:\n\n  quantkit recipes show gptq-w4")
def show_command(name: NAME) -> None:
    """Print a recipe."""
    sys.stdout.write(recipe.read(name)[1])


@app.command("init", epilog="Examples:\n\n  quantkit recipes init gptq -o mine.yaml")
def init_command(method: METHOD = "gptq", output: FILE = None) -> None:
    """Write a recipe with every option of a method, its default and its help."""
    text, path = recipe.template(method), output or Path(f"{method}.yaml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise QuantkitError(f"{path} exists", "choose another file with --output", USAGE) from error
    except OSError as error:
        raise QuantkitError(f"{path} cannot be written: {error.strerror}", "change --output") from error
    print_written([path])
    print(f"\nnext: quantkit run {quote(str(path))} MODEL --dry-run")
