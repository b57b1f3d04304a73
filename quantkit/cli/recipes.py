"""List, show and create recipes.

Examples:
  quantkit recipes list
  quantkit recipes show gptq-w4 > mine.yaml
  quantkit recipes init gptq -o mine.yaml     # every option, with its help
"""

import os
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from quantkit.cli import commands, flags, streams
from quantkit.errors import USAGE, require
from quantkit.evaluation.comparison.report import writing
from quantkit.quantize import methods
from quantkit.quantize.prepare import recipe
from quantkit.tables import make_console, make_table, print_table, print_written

app = typer.Typer(cls=commands.Group, add_completion=False, no_args_is_help=True)


@app.command("list", epilog="Examples:\n\n  quantkit recipes list --json")
@flags.command(shared=("as_json",), helps={"as_json": "Print them as JSON."})
def list_command(**values: Any) -> None:
    """List the recipes that come with quantkit."""
    recipes = map(recipe.load, recipe.shipped())
    rows = [{"name": r.name, "method": r.method, "description": r.description} for r in recipes]

    def show() -> None:
        table = make_table("recipe", "method", "description")
        for row in rows:
            table.add_row(*row.values())
        print_table(make_console(), table, 1, 2)

    streams.present({"schema": "quantkit.recipes/1", "recipes": rows}, values["as_json"], show)


@app.command("show", epilog="Examples:\n\n  quantkit recipes show gptq-w4")
@flags.command(shared=())
def show_command(name: flags.RECIPE) -> None:
    """Print a recipe."""
    sys.stdout.write(recipe.read(name)[1])


@app.command("init", epilog="Examples:\n\n  quantkit recipes init gptq -o mine.yaml")
@flags.command(shared=("output",), helps={"output": "File to write. (default: METHOD.yaml)"})
def init_command(
    method: flags.argument("Method whose options are written.", autocompletion=methods.available) = "gptq",
    **values: Any,
) -> None:
    """Write a recipe with every option of a method, its default and its help."""
    hint = "it writes a recipe: quantkit auto MODEL --bpw 4 --recipe-out FILE"
    require(method != "auto", "auto takes no recipe", hint, USAGE)
    text, path = recipe.template(method), values["output"] or Path(f"{method}.yaml")
    require(not os.path.lexists(path), f"{path} exists", "choose another -o", USAGE)
    with writing(path, whole=True):
        path.write_text(text, encoding="utf-8")
    print_written([path])
    print(f"\nnext: quantkit run {quote(str(path))} MODEL --dry-run")
