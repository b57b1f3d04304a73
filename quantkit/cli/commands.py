"""All commands by name and summary. A command's module is imported only when the command is called."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quantkit.cli import ranks, running
from quantkit.errors import EXIT_CODES, QuantkitError
from quantkit.quantize import methods

COMPRESS = "Compress"  # the panel of the help with the commands of methods
PANELS = {  # all other commands, by panel; a command's summary is the first line of its module
    COMPRESS: ("auto", "run", "distill"),
    "Before you start": ("plan", "sample", "imatrix", "doctor"),
    "Measure": ("eval", "report", "bench", "specdec"),
    "Run": ("generate", "chat", "serve"),
    "Housekeeping": ("inspect", "convert", "push", "verify", "recipes"),
}
OTHERS = {name: panel for panel, names in PANELS.items() for name in names}
PARTS = {  # subcommands: the help of the command before them lists them
    "bench attention": "Time and memory of one model's attention implementations, by prompt length.",
    "bench batching": "Throughput and latency of one model that answers many requests, by way of batching.",
}
SHOWN = {  # options that --help of a job shows; --help-all shows all
    *("output", "dry_run", "resume", "overwrite", "eval_text", "as_json", "bits", "group_size", "sym"),
    *("solver", "target", "transform", "layout", "format", "type", "double_quant"),
    *("calibration", "samples", "seqlen", "override", "device", "max_memory", "recipe_name"),
    *("activations", "kv_cache", "threshold", "head", "push", "help_all"),
}
CHECKPOINTS = ("model", "models", "path", "teacher", "student", "target")  # arguments that are checkpoints
SHARED = ("run", "imatrix", "eval")  # commands, besides methods, that run as several processes


def names() -> list[str]:
    """Return the names of all commands, in the order of the help."""
    return [*methods.available(), *OTHERS]


def summary(name: str) -> str:
    """Return the one-line help of a command, read from the source: importing all commands would slow the
    help."""
    if name in PARTS:
        return PARTS[name]
    if name not in OTHERS:
        return methods.summary(name)
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return source.removeprefix('"""').partition("\n")[0]


@functools.cache
def build(name: str) -> Any:
    """Import a command's module and return the command with all its flags."""
    first, _, part = name.partition(" ")
    module = importlib.import_module(f"quantkit.cli.{first if first in OTHERS else 'quantize'}")
    examples = (module.__doc__ or "").partition("\n\n")[2].strip()
    if hasattr(module, "app"):  # a group of commands
        app = module.app
    else:
        app, function = typer.Typer(add_completion=False), module.command
        if part:
            function, examples = getattr(module, part), module.EXAMPLES[part]
        elif first not in OTHERS:
            function, examples = module.command(name), module.examples(name)
        app.command(name)(function)
    for row in app.registered_commands:
        row.cls = Command
        if ranks.process_count() > 1:
            row.callback = _alongside(row.callback, name)
    command = typer.main.get_command(app)
    from quantkit.options import DTYPES

    command.context_settings["token_normalize_func"] = lambda typed: DTYPES.get(typed, typed)
    command.name, command.help = name, summary(name)
    below = [f"  quantkit {part} --help     # {PARTS[part]}" for part in PARTS if part.startswith(f"{name} ")]
    paragraphs = ["Subcommands:", *below] if below else []
    command.epilog = "\n\n".join([*paragraphs, examples.replace("\n  ", "\n\n  ")])  # one per example
    return command


class _WithoutBool:
    """A command whose help shows no type for flags without a value."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        """Return all parameters, `--help` included."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_WithoutBool, TyperCommand):
    """A command whose `--help` shows common options; if it has `--help-all`, that shows all of them."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Print the help without advanced options, except with --help-all. Completion still offers them."""
        rows = self.params
        if ctx.meta.get("help_all") or not any(row.name == "help_all" for row in rows):
            return super().format_help(ctx, formatter)
        advanced = [row for row in rows if row.param_type_name == "option" and row.name not in SHOWN]
        for row in advanced:
            row.hidden = True
        super().format_help(ctx, formatter)
        for row in advanced:
            row.hidden = False

    def invoke(self, ctx: typer.Context) -> Any:
        """Check --device, --threads and paths of checkpoints, then run the command."""
        from quantkit.models.files import hub
        from quantkit.options import check_machine

        threads = ctx.params.get("threads")
        check_machine(ctx.params.get("device"), threads)
        if threads:  # torch reads the variable when it is imported
            os.environ["OMP_NUM_THREADS"] = str(threads)
        rows = [row.name for row in self.params if row.param_type_name == "argument"]
        if self.name in (*methods.available(), "run", "inspect", "plan"):  # these look by themselves
            rows = []
        for given in (ctx.params[name] or () for name in rows if name in CHECKPOINTS):
            for place in [given] if isinstance(given, str) else given:
                if not os.path.lexists(place):  # raises unless it may be a hub id or the name of shards
                    hub.local(running.decoded(place))
        return super().invoke(ctx)


class Group(_WithoutBool, TyperGroup):
    """A group of commands, such as `quantkit recipes`."""


class Root(Group):
    """The root command: lists commands in panels by name and summary, and imports only the one called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in (*names(), *PARTS):
            panel = OTHERS.get(name, COMPRESS)
            listed = TyperCommand(name, help=summary(name), rich_help_panel=panel, hidden=name in PARTS)
            self.add_command(listed)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that is called, with all its flags."""
        if (part := " ".join(args[:2])) in PARTS:
            args = [part, *args[2:]]
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and build(name), rest


def _alongside(function: Callable[..., None], name: str) -> Callable[..., None]:
    """Make the function of a command join the other ranks under torchrun, or raise QuantkitError."""

    @functools.wraps(function)
    def invoke(**values: Any) -> None:
        ranks.refuse(name, name in (*methods.available(), *SHARED))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # quantkit reports a lost process in one line
        from quantkit.models.machine import distributed

        with running.stopping() as signals:
            try:
                with distributed.joined(values.get("device", "auto")):
                    if distributed.rank():
                        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
                    function(**values)
            except KeyboardInterrupt as error:
                if not signals:
                    raise
                raise QuantkitError(EXIT_CODES[signals[0]], exit_code=signals[0]) from error

    return invoke
