"""What is started: the engine's own command, with nothing in it that another shell could not run."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEY_VARIABLE = "QUANTKIT_API_KEY"  # where a shell that runs the printed line has the key


@dataclass(frozen=True)
class Command:
    """argv: program and arguments; env: variables on top of ours; secret: the variable that the engine takes
    its key from, and the key. model: the name that requests give; notes: what a user should know."""

    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret: tuple[str, str] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """The command for a shell, on one line, a program on the PATH by its name; the key is taken from the
        shell's own environment."""
        given = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        given += [f'{self.secret[0]}="${KEY_VARIABLE}"'] if self.secret else []
        program = Path(self.argv[0]).name
        program = program if shutil.which(program) == self.argv[0] else self.argv[0]
        return " ".join([*given, shlex.join([program, *self.argv[1:]])])

    def environment(self) -> dict[str, str]:
        """All variables of the process."""
        found = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env}
        found.pop(KEY_VARIABLE, None)
        return found | dict([self.secret] if self.secret else [])
