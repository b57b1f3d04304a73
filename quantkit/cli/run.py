"""Run a job from a recipe: options in a YAML file.

Examples:
  quantkit run gptq-w4 ./model
  quantkit run recipe.yaml org/name --set quant.bits=3 --set quant.sym=false
  quantkit run recipe.yaml --resume     # after an interruption
"""

from typing import Annotated, Any

import typer

from quantkit.cli import flags, quantize
from quantkit.quantize.prepare import recipe as recipes


@flags.command(
    *(row for section, kind in recipes.SHARED.items() for row in flags.of(section, kind)),
    shared=[name for name in flags.JOB if name != "recipe_name"],
)
def command(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help="A shipped recipe or a YAML file.",
            autocompletion=flags.completion(recipes.shipped),
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder, GGUF file or hub id. (default: the recipe's model)"),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key of the recipe, such as quant.bits=3. Repeatable."
        ),
    ] = (),
    **values: Any,
) -> None:
    quantize.run(recipes.load(recipe), settings, context, values | {"model": model})
