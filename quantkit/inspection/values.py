"""Check all values: read and decode every weight, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quantkit.errors import QuantkitError
from quantkit.inspection.clients import of_damaged
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton

Listener = Callable[[str, int, int], None]  # what, done, of how many


def check(checkpoint: Checkpoint, record: dict[str, Any], listen: Listener) -> None:
    """Add to the record's `integrity` what is wrong with values: tensors that the model needs and the
    checkpoint lacks, shapes, weights that cannot be decoded, scales and weights that are not finite.

    Where transformers cannot build the model, values are not read, and `notes` say so.
    """
    found = record["integrity"]
    try:
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    except QuantkitError as error:
        found["notes"] = [f"values were not read: {error.message}"]
        return
    checkpoint, stored = skeleton.checkpoint, skeleton.names.stored
    weights = {stored[name]: (name, parameter) for name, parameter in skeleton.stored_parameters().items()}
    problems = [f"{name} is absent" for name in skeleton.names.missing()]
    for done, parameter in enumerate(weights.values(), start=1):
        problems += _errors_of(partial(skeleton.read, *parameter))
        listen("reading the weights", done, len(weights))
    if record["tokenizer"]:
        problems += _errors_of(lambda: checkpoint.tokenizer)
    if problems:
        record["clients"] = of_damaged(record["clients"])
    found["problems"] += [problem for problem in problems if problem not in found["problems"]]
    unused = [name for name in checkpoint.names if name not in weights]
    found.update(deep=True, notes=[f"{name} is no part of the model" for name in unused])


def _errors_of(read: Callable[[], Any]) -> list[str]:
    try:
        read()
    except QuantkitError as error:
        return [error.message]
    return []
