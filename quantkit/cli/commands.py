"""All commands by name and summary. A command's module is imported only when the command is called."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quantkit.cli import ranks, running
from quantkit.errors import EXIT_CODES, QuantkitError
from quantkit.quantize import methods

COMPRESS, BEFORE, MEASURE = "Compress", "Before you start", "Measure"  # panels of the help
RUN, HOUSEKEEPING = "Run", "Housekeeping"
OTHERS = {  # all commands except methods: (panel of the help, summary)
    "auto": (COMPRESS, "Search the bits of every linear for the least loss within a size or a loss."),
    "run": (COMPRESS, "Run a job from a recipe: options in a YAML file."),
    "distill": (COMPRESS, "Train scales and norms of a compressed model to predict what the original does."),
    "plan": (BEFORE, "Estimate memory, speed and job times from headers, before anything is loaded."),
    "sample": (BEFORE, "Generate calibration text with the model itself; no dataset is needed."),
    "imatrix": (BEFORE, "Write an importance matrix for llama-quantize."),
    "doctor": (BEFORE, "List versions, devices, memory, disk and optional packages of this machine."),
    "eval": (MEASURE, "Compare checkpoints with the first: perplexity, KL divergence, tasks."),
    "report": (MEASURE, "Turn results of eval and bench into one HTML page."),
    "bench": (MEASURE, "Measure tokens per second, latency and memory of checkpoints, by engine."),
    "specdec": (MEASURE, "Measure whether speculative decoding pays, and with which draft model."),
    "generate": (RUN, "Continue a prompt with one or several models, side by side."),
    "chat": (RUN, "Talk to a model in the terminal."),
    "serve": (RUN, "Start an OpenAI-compatible server with vLLM, llama.cpp, transformers or mlx-lm."),
    "inspect": (HOUSEKEEPING, "Show what a checkpoint contains and which clients load it."),
    "convert": (HOUSEKEEPING, "Store the same integers in another layout, without any change of a weight."),
    "push": (HOUSEKEEPING, "Verify a checkpoint and upload it to the hub."),
    "verify": (HOUSEKEEPING, "Check a checkpoint for damage, and measure the error of every linear again."),
    "recipes": (HOUSEKEEPING, "List, show and create recipes."),
}
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
MODULES = {"eval": "evaluate", "run": "quantize"}  # commands whose module has another name
SHARED = ("run", "imatrix", "eval")  # commands, besides methods, that run as several processes


def names() -> list[str]:
    """Return the names of all commands, in the order of the help."""
    return [*methods.available(), *OTHERS]


def summary(name: str) -> str:
    """Return the one-line help of a command."""
    if name in PARTS:
        return PARTS[name]
    return OTHERS[name][1] if name in OTHERS else methods.summary(name)


@functools.cache
def build(name: str) -> Any:
    """Import a command's module and return the command with all its flags."""
    first = name.partition(" ")[0]
    module = importlib.import_module(
        f"quantkit.cli.{MODULES.get(first, first) if first in OTHERS else 'quantize'}"
    )
    if hasattr(module, "app"):  # a group of commands
        app = module.app
    else:
        app = typer.Typer(add_completion=False)
        function, epilog = _parts(module, name)
        app.command(name, epilog=epilog.replace("\n  ", "\n\n  "))(function)  # one paragraph per example
    for row in app.registered_commands:
        function = row.callback if ranks.process_count() == 1 else _alongside(row.callback, name)
        row.cls, row.callback = Command, running.with_verbose(function)
    command = typer.main.get_command(app)
    from quantkit.options import DTYPES

    command.context_settings["token_normalize_func"] = lambda typed: DTYPES.get(typed, typed)
    command.name, command.help = name, summary(name)
    if below := [
        f"  quantkit {part} --help     ({PARTS[part]})" for part in PARTS if part.startswith(f"{name} ")
    ]:
        command.epilog = "\n\n".join(["Subcommands:", *below, command.epilog])
    return command


def _parts(module: Any, name: str) -> tuple[Callable[..., None], str]:
    """Return the function that runs a command, and its examples."""
    if name == "run":
        return module.run_command(), module.RUN_EPILOG
    if name in PARTS:
        part = name.rpartition(" ")[2]
        return getattr(module, part), module.EPILOGS[part]
    if name not in OTHERS:
        return module.command(name), module.epilog(name)
    return module.command, module.EPILOG


def _without_bool(parameters: list[Any]) -> list[Any]:
    """Return a command's parameters, changed such that the help shows no type for flags without a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
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

    def get_params(self, ctx: typer.Context) -> list[Any]:
        """Return all parameters, `--help` included."""
        return _without_bool(super().get_params(ctx))

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


class Commands(Mapping):
    """Commands by name, each built when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in (*names(), *PARTS):
            raise KeyError(name)
        return build(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*names(), *PARTS])

    def __len__(self) -> int:
        return len(names()) + len(PARTS)


class Root(TyperGroup):
    """The root command: lists commands in panels and imports only the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Return names only: Typer's own method would build every command."""
        return names()

    def get_params(self, ctx: typer.Context) -> list[Any]:
        """Return all parameters, `--help` included."""
        return _without_bool(super().get_params(ctx))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Return a command with name and summary only, for the list of commands; None if there is none."""
        if cmd_name not in (*names(), *PARTS):
            return None
        panel = OTHERS[cmd_name][0] if cmd_name in OTHERS else COMPRESS
        return TyperCommand(cmd_name, help=summary(cmd_name), rich_help_panel=panel)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that is called, with all its flags."""
        if (part := " ".join(args[:2])) in PARTS:
            args = [part, *args[2:]]
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.commands[name], rest


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
