"""What users call formats and precisions, to what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from quantkit.capacity import formats
from quantkit.errors import USAGE, QuantkitError

FORMAT_ALIASES = {
    "as stored": "stored",
    "fp16": "bf16",
    "bfloat16": "bf16",
    "float16": "bf16",
    "gguf": "Q4_K_M",
}


def format(text: str) -> str:
    """A format of weights. Raises QuantkitError with the nearest names for an unknown one."""
    spelled = {name.lower(): name for name in (formats.STORED, *formats.names())}
    return spelled[_known(text.lower(), spelled, FORMAT_ALIASES, "--method").lower()]


def _known(text: str, names: Collection[str], aliases: Mapping[str, str], flag: str) -> str:
    name = aliases.get(text, text)
    if name in names or name.lower() in names:
        return name
    near = difflib.get_close_matches(text, [*names, *aliases], 2)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise QuantkitError(f"{flag} {text!r} is not known", f"{meant}choose one of {', '.join(names)}", USAGE)
