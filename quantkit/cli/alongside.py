"""Commands under torchrun: join the group of processes, or refuse."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quantkit.cli import ranks, running
from quantkit.errors import EXIT_CODES, QuantkitError
from quantkit.quantize import methods

if TYPE_CHECKING:
    import typer

OTHERS = ("run", "imatrix", "eval")  # commands besides the methods that several processes share


def guard(app: typer.Typer, name: str) -> None:
    """Make the commands of an application join the other processes, or refuse if unsupported."""
    for command in app.registered_commands:
        command.callback = _alongside(command.callback, name)
    for group in app.registered_groups:
        guard(group.typer_instance, name)


def _alongside(function: Callable[..., None], name: str) -> Callable[..., None]:
    @functools.wraps(function)
    def invoke(**values: Any) -> None:
        ranks.refuse(name, name in (*methods.available(), *OTHERS))
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
