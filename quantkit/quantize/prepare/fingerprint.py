"""How the fingerprints of two jobs differ, in the words of the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from quantkit.options import CalibrationOptions, RunOptions

OPTIONS = {
    field.name for section in (CalibrationOptions, RunOptions) for field in dataclasses.fields(section)
}
WORDS = {  # entries that are no option's value
    "quantkit": "version of quantkit",
    "torch": "version of torch",
    "transformers": "version of transformers",
    "source_sha256": "files of the model",
    "method": "method",
    "calibration": "calibration text",
    "calibration.source": "--calibration",
    "calibration.sha256": "calibration tokens",
    "calibration.bos": "BOS token before each text",
    "calibration.chat_template": "chat template",
    "calibration.dataset": "dataset of --calibration",
}


def differences(stored: dict, wanted: dict, prefix: str = "") -> list[str]:
    """The entries in which the fingerprint of a staged job and that of another differ, with both values."""
    found = []
    for key in sorted(stored.keys() | wanted.keys()):
        left, right = stored.get(key), wanted.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{_words(prefix, key)} ({_value(left)} there, {_value(right)} here)")
    return found


def _words(prefix: str, key: str) -> str:
    """What a user calls an entry: the flag that sets it, where one does."""
    if prefix + key in WORDS:
        return WORDS[prefix + key]
    if prefix == "options." or key in OPTIONS:
        return f"--{key.replace('_', '-')}"
    return f"{prefix}{key}".replace(".", " ").replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return "one"
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text  # a sha256
