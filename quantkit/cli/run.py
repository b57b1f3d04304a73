"""Run a job from a recipe: options in a YAML file.

Examples:
  quantkit run gptq-w4 ./model
  quantkit run recipe.yaml org/name --set quant.bits=3 --set quant.sym=false
  quantkit run recipe.yaml --resume     # after an interruption
"""

from typing import Any

import typer

from quantkit.cli import flags, quantize
from quantkit.quantize.prepare import recipe as recipes


@flags.command(
    *(row for section, kind in recipes.SHARED.items() for row in flags.of(section, kind)),
    shared=[name for name in flags.JOB if name != "recipe_name"],
)
def command(
    context: typer.Context,
    recipe: flags.RECIPE,
    model: flags.argument(
        "Checkpoint folder, GGUF file or hub id. (default: the recipe's model)", str | None
    ) = None,
    settings: flags.flag(
        "Set a key of the recipe, such as quant.bits=3. Repeatable.", list[str], "--set", metavar="KEY=VALUE"
    ) = (),
    **values: Any,
) -> None:
    quantize.run(recipes.load(recipe), settings, context, values | {"model": model})
