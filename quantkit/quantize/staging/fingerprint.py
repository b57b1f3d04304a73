"""Compare the fingerprints of two jobs, and name the differences by flags."""

import dataclasses
from typing import Any

import torch
import transformers

from quantkit import __version__
from quantkit.errors import UNSUPPORTED, name_all, require
from quantkit.models.machine import distributed
from quantkit.models.machine.device import machine_of
from quantkit.options import CalibrationOptions, RunOptions

OPTIONS = {
    field.name for section in (CalibrationOptions, RunOptions) for field in dataclasses.fields(section)
}
WORDS = {  # entries that are no option's value, in the words of a user
    "source_sha256": "files of the model",
    "calibration": "calibration text",
    "calibration.source": "--calibration",
    "calibration.sha256": "calibration tokens",
}


def versions() -> dict[str, str]:
    """Return the versions that a job's output depends on."""
    return {"quantkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def differences(stored: dict, requested: dict, prefix: str = "") -> list[str]:
    """Return a text with both values for each entry in which two fingerprints differ. Options that only one
    of two commands has are left out."""
    different = []
    foreign = stored.keys() ^ requested.keys() if prefix == "options." else set()
    for key in sorted((stored.keys() | requested.keys()) - foreign):
        left, right = stored.get(key), requested.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            different += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            different.append(f"{_words(prefix, key)} ({_value(left)} there, {_value(right)} here)")
    return different


def _words(prefix: str, key: str) -> str:
    """Return the flag that sets an entry, or the entry's name in words."""
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


def check_equal(fingerprint: dict) -> None:
    """Raise QuantkitError unless all ranks, which decide by themselves, have the same job and machine."""
    if distributed.count() == 1:
        return
    mine = {name: value for name, value in fingerprint.items() if name != "source_sha256"}
    mine |= {"processor": torch.backends.cpu.get_cpu_capability()}
    if mine["execution"]["device"] != "cpu":
        mine |= {"GPU": machine_of(torch.device(mine["execution"]["device"]))}
    first, *others = distributed.all_gather(mine)
    for rank, other in enumerate(others, 1):
        different = differences(first, other)
        what = f"rank {rank} has another job than rank 0; different: {name_all(different)}"
        hint = "use equal machines, with the same files, options and versions"
        require(not different, what, hint, UNSUPPORTED)
