"""Old names of flags, commands and recipe keys. They work for one version, with a warning."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

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
    "gptq": {"--mse": "--search-scale"},
    "awq": {"--clip": "--search-scale", "--n-grid": "--candidates", "--zero-point": "--no-sym"},
    "gguf": {"--pre": "--pre-tokenizer"},
    "fp8": {"--mse": "--search-scale"},
    "fp4": {"--search": "--search-scale"},
    "w8a8": {"--mse": "--search-scale"},
    "plan": {"--method": "--format"},
    "specdec": {"--text": "--prompt-text"},
}


def renewed(command: str, arguments: Sequence[str], silent: bool = False) -> tuple[str, list[str]]:
    """Return command and arguments with new names, and warn of each old one. Arguments after `--` stay."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    typed, rest, renamed = list(arguments[:end]), arguments[end:], OLD.get(command, {})
    for old, new in renamed.items():
        if " " in new and any(argument.partition("=")[0] == old for argument in typed):
            moved, _, flag = new.rpartition(" ")
            silent or _warn(f"{command} {old} is now a command of its own: use quantkit {moved}")
            return renewed(moved, [*_replaced(typed, old, flag), *rest], silent)
    for old, new in (renamed | {_negated(old): _negated(new) for old, new in renamed.items()}).items():
        found = _replaced(typed, old, new)
        silent or found == typed or _warn(f"{old} is now {new}")
        typed = found
    return command, [*typed, *rest]


def renewed_key(method: str, key: str, value: Any) -> tuple[str, Any]:
    """Return a recipe's key and value under their new names, and warn if the key was old."""
    section, _, name = key.rpartition(".")
    for old, new in OLD.get(method, {}).items():
        if section in ("", "quant") and name.replace("-", "_") == _field(old):
            negated = new.startswith("--no-")
            found = f"quant.{_field(_negated(new) if negated else new)}"
            _warn(f"{key} is now {found}" + ", and means the opposite" * negated)
            return found, not value if negated and isinstance(value, bool) else value
    return key, value


def _negated(flag: str) -> str:
    return flag.replace("--no-", "--") if flag.startswith("--no-") else flag.replace("--", "--no-")


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _replaced(arguments: Sequence[str], old: str, new: str) -> list[str]:
    """Return arguments with flag `new` for `old`, also in `--old=value`; "" removes the flag."""
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
