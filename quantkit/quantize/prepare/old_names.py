"""Old spellings of flags, commands and recipe keys. They work for one version, with a warning."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# command -> old flag -> new flag, or `COMMAND FLAG` where the flag became a command of its own.
OLD = {
    "distill": {"--blocks": "shrink --blocks", "--text": "--calibration"},
    "shrink": {"--text": "--calibration"},
    "bench": {
        "--attn": "bench attention --implementations",
        "--batching": "bench batching --policies",
        "--url": "bench server ",
        "--prompt": "--prompt-tokens",
    },
    "bench attention": {"--prompt": "--prompt-tokens"},
    "bench batching": {"--prompt": "--prompt-tokens"},
    "bench server": {"--prompt": "--prompt-words", "--remote": "--allow-remote"},
    "plan": {"--method": "--format"},
    "specdec": {"--text": "--prompt-text"},
}


def renewed(command: str, arguments: Sequence[str], silent: bool = False) -> tuple[str, list[str]]:
    """Return command and arguments in new spellings, and warn of every old one. What follows `--` stays."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for old, new in OLD.get(command, {}).items():
        if " " in new and any(argument.partition("=")[0] == old for argument in arguments[:end]):
            moved, _, flag = new.rpartition(" ")
            silent or _warn(f"{command} {old} is now a command of its own: use quantkit {moved}")
            arguments[:end] = _replaced(arguments[:end], old, flag)
            return renewed(moved, arguments, silent)
    for old, new in OLD.get(command, {}).items():
        found = _replaced(arguments[:end], old, new)
        if found != arguments[:end]:
            silent or _warn(f"{old} is now {new}")
            arguments[:end] = found
    return command, arguments


def _replaced(arguments: Sequence[str], old: str, new: str) -> list[str]:
    """Return arguments with `new` for the flag `old`, also in `--old=value`; an empty `new` leaves values."""
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag != old:
            found.append(argument)
        elif new or equals:
            found.append(new + equals + value if new else value)
    return found


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one of several processes
        print(f"warning: {text}", file=sys.stderr)
