"""Rules of a GPTQ configuration for single linears, as GPTQModel and vLLM read them. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.errors import QuantkitError

Rule = tuple[re.Pattern, dict[str, Any]]


def stored_rules(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """GPTQModel's `dynamic`: `{"+:pattern": {"bits": …, "group_size": …}}`; without a sign it is a plus.

    Raises QuantkitError for what is no such thing.
    """
    stored = config.get("dynamic") or {}
    if not isinstance(stored, dict):
        raise QuantkitError("quantization_config's dynamic is not understood", "download config.json again")
    rules = []
    for pattern, values in stored.items():
        values = values if isinstance(values, dict) else {}
        known = {key: value for key, value in values.items() if key in ("bits", "group_size")}
        try:
            compiled = re.compile(pattern.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            raise QuantkitError(
                f"quantization_config's dynamic holds {pattern!r}, which is no regular expression",
                hint="download config.json again",
            ) from error
        if not pattern.startswith("-:"):
            rules.append((compiled, known))
    return tuple(rules)


def rule_of(rules: Sequence[Rule], linear: str) -> dict[str, Any]:
    """What the first rule that matches says of one linear; {} where none does."""
    return next((rule for pattern, rule in rules if pattern.match(linear)), {})
