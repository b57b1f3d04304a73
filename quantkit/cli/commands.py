"""The commands by name: the root's help needs no more than this, a module is imported for its own command."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quantkit.cli import ranks, running
from quantkit.quantize import methods

OTHERS = {  # every other command than the methods, and its help
    "run": "Run the job of a recipe.",
    "auto": "The best within a budget: every linear gets the bits at which the model loses least.",
    "imatrix": "Measure how much each input of every linear counts: an importance matrix in a GGUF file.",
    "sample": "Let a model write text by itself, to be calibrated on: of its own kind and language.",
    "plan": "Memory, cache and speed of a model on a device, and what each job takes: before anything is "
    "loaded.",
    "eval": "Perplexity, and divergence from the first model, of checkpoints of any layout.",
    "report": "An HTML page of evaluations: table, plots, errors by layer, protocol.",
    "inspect": "What is in a checkpoint: method, bits, bytes by part, origin, which clients load it, is it "
    "whole.",
    "verify": "Is a checkpoint what was written: sums, values, and every linear's error measured again.",
    "generate": "Continue a prompt with one model or several side by side, and mark where they part.",
    "bench": "What checkpoints cost to run, side by side: tokens per second, latency, memory, by engine.",
    "serve": "Hand a checkpoint over to an engine's own server, and prove that it answers.",
    "chat": "Talk to a model: its cache is kept between turns, speed and memory are told after each.",
    "specdec": "Does speculative decoding pay? Drafts, and how much they draft, against the target alone.",
    "distill": "Train a student on its teacher: scales and norms of a compressed one, or a smaller model.",
    "doctor": "Versions, devices, memory, disk and the hub; optional packages and what each would enable.",
    "recipes": "List, show and begin recipes: jobs in a YAML file.",
}
MODULES = {"eval": "evaluate", "run": "quantize"}  # of commands that are not called like theirs


def names() -> list[str]:
    """Of all commands, in the order of the help."""
    return [*methods.available(), *OTHERS]


def summary(name: str) -> str:
    """The help of a command, in a line."""
    return OTHERS[name] if name in OTHERS else methods.summary(name)


@functools.cache
def build(name: str) -> Any:
    """The command with all its flags, which imports its module."""
    module = importlib.import_module(
        f"quantkit.cli.{MODULES.get(name, name) if name in OTHERS else 'quantize'}"
    )
    if hasattr(module, "app"):  # a group of its own
        app = module.app
    else:
        app = typer.Typer(add_completion=False)
        function, epilog = _parts(module, name)
        app.command(name, epilog=epilog)(function)
    if ranks.wanted() > 1:
        from quantkit.cli import alongside

        alongside.guard(app, name)
    running.add_verbose(app)
    command = typer.main.get_command(app)
    command.name, command.help = name, summary(name)
    return command


def _parts(module: Any, name: str) -> tuple[Callable[..., None], str]:
    """The function behind a command, and its examples."""
    if name == "run":
        return module.run_command(), module.RUN_EPILOG
    if name not in OTHERS:
        return module.command(name), module.epilog(name)
    return module.command, module.EPILOG


class Commands(Mapping):
    """name -> command, built when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in names():
            raise KeyError(name)
        return build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())


class Root(TyperGroup):
    """`quantkit` itself: lists commands by name and summary, imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Names alone: Typer's own would build every command."""
        return names()

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """What a list of commands shows of one."""
        return TyperCommand(cmd_name, help=summary(cmd_name)) if cmd_name in names() else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.commands[name], rest
