"""stdout and stderr as they may be: closed, or of an encoding that lacks most letters."""

from __future__ import annotations

import codecs
import os
import sys

PLAIN = {  # what is printed where the encoding has not the sign itself, as wide, for the sake of tables
    "–": "-",
    "—": "-",
    "−": "-",
    "─": "-",
    "━": "-",
    "│": "|",
    "…": ".",
    "→": ">",
    "←": "<",
    "▶": ">",
    "×": "x",
    "·": ".",
    "•": "*",
    "±": "~",
    "≈": "~",
    "≤": "<",
    "≥": ">",
    "Σ": "S",
    "Δ": "d",
    "µ": "u",
    "‖": "|",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "█": "#",
    "✓": "y",
}


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Python's answer to what it cannot encode: see `codecs.register_error`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def prepare() -> None:
    """Let nothing that is printed raise for where it goes: a closed stream swallows it, an encoding that is
    not Unicode's gets plain signs."""
    codecs.register_error("plain", _plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure") and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="plain")
