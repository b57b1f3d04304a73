"""Codes in a checkpoint whose configuration does not say what they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quantkit.errors import UNSUPPORTED, QuantkitError, name_all
from quantkit.models.files.safetensors_folder import TensorInfo

INTEGERS = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")
CODED = (*INTEGERS, "F8_E4M3", "F8_E5M2", "F8_E8M0")  # types of which nothing is a weight without a scale
WEIGHTS = re.compile(r"weight(_packed)?$")
HINT = (
    "config.json has no quantization_config that says how: download it again, or start from the original "
    "checkpoint"
)


def refuse(infos: Iterable[TensorInfo]) -> None:
    """Raise QuantkitError (exit code 4) naming matrices that hold codes, of a checkpoint that no layout is
    known to have written: read as they lie, they would be nonsense."""
    coded = (info for info in infos if info.dtype in CODED and len(info.shape) > 1)
    if found := [info.name for info in coded if WEIGHTS.search(info.name)]:
        raise QuantkitError(f"weights are stored as codes: {name_all(found, 3)}", HINT, UNSUPPORTED)
