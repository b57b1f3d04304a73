"""Command-line flags: made from dataclasses of options, those that commands share included."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from quantkit.cli import running
from quantkit.errors import NOT_FOUND, require
from quantkit.options import flag_of, option
from quantkit.quantize.prepare import recipe

Command = Callable[..., None]


def _help_all(context: typer.Context, requested: bool) -> None:
    if requested:
        context.meta["help_all"] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _verbose(context: typer.Context, asked: bool) -> bool:
    if asked:
        context.obj.verbose = True
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info")  # both are read at import
        os.environ["HF_HUB_VERBOSITY"] = "info"
    return asked


def argument(help: str, kind: Any = str, **how: Any) -> Any:
    """Return the annotation of a command's argument of type `kind`. how: see typer.Argument."""
    return Annotated[kind, typer.Argument(help=help, **how)]


def flag(help: str, kind: Any = str | None, *names: str, **how: Any) -> Any:
    """Return the annotation of a flag. names: by default the parameter's. how: see typer.Option."""
    return Annotated[kind, typer.Option(*names, help=help, **how)]


VERBOSE = flag(
    "Show what the libraries log, and the traceback of an error.", bool, "--verbose", "-v", callback=_verbose
)
MODEL = argument("Checkpoint folder, GGUF file or hub id.")
UNQUANTIZED = argument("Unquantized checkpoint folder, GGUF file or hub id.")
MODELS = argument("Checkpoints; the others are compared with the first.", list[str])
RECIPE = argument("A shipped recipe or a YAML file.", autocompletion=recipe.shipped)
OPENING = ("revision", "offline", "trust_remote_code", "as_json", "quiet")  # to open a checkpoint
FIRST_REVISION = {"revision": "Branch, tag or commit of the first model's hub id."}
JOB = ("output", "recipe_name", "dry_run", "resume", "overwrite", "eval_text", "push", *OPENING, "help_all")


@dataclass(frozen=True)
class Shared:
    """Flags that commands share besides their own options."""

    html: Path | None = option(None, "Write the result as an HTML page.", metavar="FILE")
    plot: Path | None = option(
        None, "Write the plots as .svg or .png; each plot after the first gets a suffix.", metavar="FILE"
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    threads: int | None = option(None, "CPU threads. (default: all cores)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of all models. auto: the first model's if the hardware supports it."
    )
    output: Path | None = option(
        None, "Output folder or GGUF file. (default: NAME-METHOD-… in the current folder)", short="-o"
    )
    recipe_name: str | None = option(
        None, "Take options from a shipped recipe or a YAML file.", flag="--recipe", names=recipe.shipped()
    )
    dry_run: bool = option(False, "Print the plan and stop. Nothing is loaded or written.")
    resume: bool = option(False, "Continue an interrupted run of the same job, even with --overwrite.")
    overwrite: bool = option(False, "Replace an existing output or staged job.")
    eval_text: Path | None = option(
        None,
        "Evaluate the original and the result on this text after the job.",
        flag="--eval",
        metavar="TEXT",
    )
    push: str | None = option(None, "Upload the result to this repository of the hub.", metavar="ORG/NAME")
    revision: str | None = option(None, "Branch, tag or commit of a hub id.")
    offline: bool = option(False, "Use only the local hub cache; never the network.")
    trust_remote_code: bool = option(False, "Run Python code from the model's repository.")
    as_json: bool = option(False, "Print the result as JSON.", flag="--json")
    quiet: bool = option(False, "Print no progress, only warnings and errors.", short="-q")
    help_all: bool = option(False, "Show all options, advanced ones included.")


def of(
    section: str, options: type, only: Collection[str] | None = None, helps: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """Return a flag for every option of a dataclass, or for those in `only`. section: panel in the help.
    helps: help that differs from that of the dataclass, by name."""
    hints = get_type_hints(options)
    fields = {field.name: field for field in dataclasses.fields(options) if field.metadata}
    names, helps = [*fields] if only is None else only, helps or {}
    return [_parameter_of(fields[name], hints[name], section, helps.get(name)) for name in names]


def _parameter_of(field: dataclasses.Field, kind: Any, section: str, help: str | None) -> inspect.Parameter:
    """Return an option as the parameter of a command. help: None: the option's own."""
    how, kind = field.metadata, (list[str] if kind == tuple[str, ...] else kind)
    help, offered, parser = help or how["help"], how["names"], how["parser"]
    no = field.default is not False or how["negated"]  # whether there is a --no-…
    names = [how["flag"] or flag_of(field.name)] if how["short"] or how["flag"] or not no else []
    names += [how["short"]] if how["short"] else []
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    named = bool(choices) and all(f"{choice}: " in help for choice in choices)  # wide types shorten names
    described = typer.Option(
        *names,
        help=help,
        rich_help_panel=section.capitalize(),
        autocompletion=(lambda: offered) if offered else None,
        parser=parser,
        metavar=how["metavar"] or ("TOKENS" if parser else "CHOICE" if named else None),
        callback=_help_all if field.name == "help_all" else None,
        is_eager=field.name == "help_all",
    )
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    return parameter(field.name, Annotated[kind, described], default)


def by_panel(panels: Mapping[str, Collection[str]], options: type) -> list[inspect.Parameter]:
    """Return the flags of a dataclass in panels of the help: {panel: names, also of absent options}."""
    names = {field.name for field in dataclasses.fields(options)}
    shown = {panel: [name for name in listed if name in names] for panel, listed in panels.items()}
    return [row for panel, listed in shown.items() for row in of(panel, options, listed)]


def options(kind: type, values: dict[str, Any]) -> Any:
    """Return an instance of the dataclass `kind`, filled with the values of a command's flags."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values})


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """Return one argument or flag in the form that Typer reads from a signature."""
    if isinstance(default, tuple):
        default = list(default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def command(
    *generated: inspect.Parameter, shared: Collection[str] = OPENING, helps: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Decorate the function of a command with `--verbose` and flags that its signature lacks; `**values` gets
    their values. `generated` come before the flags in the signature, those of Shared named in `shared` after
    them. helps: help that differs from that of Shared, by name."""

    def decorate(function: Command) -> Command:
        signature = inspect.signature(function, eval_str=True).parameters.values()
        own = [row.replace(kind=row.KEYWORD_ONLY) for row in signature if row.kind is not row.VAR_KEYWORD]
        verbose = parameter("verbose", VERBOSE, False)
        parameters = [*generated, *own, *of("options", Shared, shared, helps), verbose]

        @functools.wraps(function)
        def invoke(verbose: bool, **values: Any) -> None:
            function(**{name: running.decoded(value) for name, value in values.items()})

        invoke.__signature__ = inspect.Signature(parameters)
        invoke.__annotations__ = {row.name: row.annotation for row in parameters}
        return invoke

    return decorate


def check_text(text: Path | None) -> None:
    """Raise QuantkitError if the text of --eval is given but is not a file."""
    what = f"text {text} cannot be read: no such file"
    require(not text or text.is_file(), what, "check the path given to --eval", NOT_FOUND)


def typed(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were typed on the command line."""
    return {k: v for k, v in values.items() if context.get_parameter_source(k).name == "COMMANDLINE"}
