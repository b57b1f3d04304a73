"""Command-line flags: made from dataclasses of options, plus the flags that all jobs share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from quantkit.errors import NOT_FOUND, require
from quantkit.options import flag_of
from quantkit.quantize.prepare import recipe

Command = Callable[..., None]


def completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a shell completion that offers the names beginning with the typed text."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _help_all(context: typer.Context, requested: bool) -> None:
    if requested:
        context.meta["help_all"] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _switch(flag: str, help: str, **settings: Any) -> tuple[Any, bool]:
    """Return the annotation and the default of a flag that takes no value."""
    return Annotated[bool, typer.Option(flag, help=help, **settings)], False


OUTPUT = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Output folder or GGUF file. (default: NAME-METHOD-… in the current folder)"
    ),
]
REVISION = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
OFFLINE = Annotated[bool, typer.Option("--offline", help="Use only the local hub cache; never the network.")]
TRUST_REMOTE_CODE = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code from the model's repository.")
]
MODELS = Annotated[list[str], typer.Argument(help="Checkpoints; the others are compared with the first.")]
DEVICE = Annotated[str, typer.Option(help="cpu, cuda, cuda:N or mps; auto takes cuda if available.")]
THREADS = Annotated[int | None, typer.Option(help="CPU threads. (default: all cores)")]
FIRST_REVISION = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the first model's hub id.")
]
HTML = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as an HTML page.")]
PLOT = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the plots as .svg or .png; each plot after the first gets a suffix."
    ),
]
RECIPE = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="Take options from a shipped recipe or a YAML file.",
        autocompletion=completion(recipe.shipped),
    ),
]
EVAL_TEXT = Annotated[
    Path | None,
    typer.Option(
        "--eval", metavar="TEXT", help="Evaluate the original and the result on this text after the job."
    ),
]
PUSH = Annotated[
    str | None,
    typer.Option(metavar="ORG/NAME", help="Upload the result to this repository of the hub."),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress, only warnings and errors.")]
FIXED: dict[str, tuple[Any, Any]] = {  # flags that are no options of the job itself: (annotation, default)
    "output": (OUTPUT, None),
    "recipe_name": (RECIPE, None),
    "dry_run": _switch("--dry-run", "Print the plan and stop. Nothing is loaded or written."),
    "resume": _switch("--resume", "Continue an interrupted run of the same job."),
    "overwrite": _switch("--overwrite", "Replace an existing output or staged job."),
    "eval_text": (EVAL_TEXT, None),
    "push": (PUSH, None),
    "revision": (REVISION, None),
    "offline": (OFFLINE, False),
    "trust_remote_code": (TRUST_REMOTE_CODE, False),
    "as_json": (AS_JSON, False),
    "quiet": (QUIET, False),
    "help_all": _switch(
        "--help-all", "Show all options, advanced ones included.", is_eager=True, callback=_help_all
    ),
}
OPENING = ("revision", "offline", "trust_remote_code", "as_json", "quiet")  # to open a checkpoint
OPENING_SEVERAL = OPENING[1:]  # the same for several, of which only the first has a revision


def of(section: str, options: type, only: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return a flag for every option of a dataclass, or for those in `only`. section: panel in the help."""
    hints, parameters = get_type_hints(options), []
    fields = {field.name: field for field in dataclasses.fields(options) if field.metadata}
    for field in [fields[name] for name in only] if only else fields.values():
        kind = list[str] if hints[field.name] == tuple[str, ...] else hints[field.name]
        short = field.metadata["short"]
        name = field.metadata.get("flag") or flag_of(field.name)
        no = field.default is not False or field.metadata.get("negated")  # whether there is a --no-…
        names = [name] if short or not no or field.metadata.get("flag") else []
        names += [short] if short else []
        offered, help = field.metadata["names"], field.metadata["help"]
        parser = field.metadata.get("parser")
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        named = bool(choices) and all(f"{choice}: " in help for choice in choices)  # wide types shorten names
        described = typer.Option(
            *names,
            help=help,
            rich_help_panel=section.capitalize(),
            autocompletion=completion(lambda offered=offered: offered) if offered else None,
            parser=parser,
            metavar=field.metadata.get("metavar") or ("TOKENS" if parser else "CHOICE" if named else None),
        )
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        parameters.append(parameter(field.name, Annotated[kind, described], default))
    return parameters


def options(kind: type, values: dict[str, Any]) -> Any:
    """Return an instance of the dataclass `kind`, filled with the values of a command's flags."""
    filled = {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in filled.items()})


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """Return one argument or flag in the form that Typer reads from a signature."""
    if isinstance(default, tuple):
        default = list(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command(*generated: inspect.Parameter, fixed: Iterable[str] = OPENING) -> Callable[[Command], Command]:
    """Decorate the function of a command with flags that its signature lacks; `**values` gets their values.

    `generated` come before the flags in the signature, those of FIXED with the names in `fixed` after them.
    """

    def decorate(function: Command) -> Command:
        signature = inspect.signature(function, eval_str=True).parameters.values()
        own = [row.replace(kind=row.KEYWORD_ONLY) for row in signature if row.kind is not row.VAR_KEYWORD]
        parameters = [*generated, *own, *(parameter(name, *FIXED[name]) for name in fixed)]
        function.__signature__ = inspect.Signature(parameters)
        function.__annotations__ = {row.name: row.annotation for row in parameters}
        return function

    return decorate


def check_text(text: Path | None) -> None:
    """Raise QuantkitError if the text of --eval is given but is not a file."""
    what = f"text {text} cannot be read: no such file"
    require(not text or text.is_file(), what, "check the path given to --eval", NOT_FOUND)


def typed(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were typed on the command line, lists as tuples."""
    given = [name for name in values if context.get_parameter_source(name).name == "COMMANDLINE"]
    return {name: tuple(v) if isinstance(v := values[name], list) else v for name in given}
