"""What the values say: every weight is read and decoded, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quantkit.errors import QuantkitError, count, name_all
from quantkit.inspection.clients import of_damaged
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.skeleton import Skeleton

Listener = Callable[[str, int, int], None]  # what, done, of how many


def check(checkpoint: Checkpoint, record: dict[str, Any], listen: Listener) -> None:
    """Add to the record's `integrity` what is wrong with values: tensors that the model needs and the
    checkpoint lacks, shapes, weights that cannot be decoded, scales and weights that are not finite. A
    matrix of zeros alone is a warning: few are meant to be.

    Where transformers cannot build the model, each tensor is read as it is stored, and `notes` say so.
    """
    found = record["integrity"]
    problems, notes, zeros = [], [], []
    try:
        skeleton = Skeleton(checkpoint, torch.float32, torch.device("cpu"))
    except QuantkitError as error:
        notes.append(f"not compared with the shapes of a model: {error.message}")
        readers = {name: partial(_read_finite, checkpoint, name) for name in checkpoint.names}
    else:
        checkpoint = skeleton.checkpoint
        problems += [f"{name} is absent" for name in skeleton.names.missing()]
        problems += dict.fromkeys(skeleton.names.misfits.values())
        readers = {
            skeleton.names.stored[name]: partial(skeleton.read, name, parameter)
            for name, parameter in skeleton.held().items()
        }
        unused = [name for name in checkpoint.names if name not in readers]
        notes += [f"{name} is no part of the model" for name in unused]
    for done, (name, read) in enumerate(readers.items(), start=1):
        problems += _check_scales(checkpoint, name) or _errors_of(partial(_look, name, read, zeros))
        listen("reading the weights", done, len(readers))
    if record["tokenizer"]:
        problems += _errors_of(lambda: checkpoint.tokenizer)
    if zeros:
        found["warnings"].append(f"{count(len(zeros), 'weight')} of zeros alone: {name_all(zeros, 3)}")
    if problems:
        record["clients"] = of_damaged(record["clients"])
    found["problems"] += [problem for problem in problems if problem not in found["problems"]]
    found.update(deep=True, notes=notes)


def _read_finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    values = checkpoint.read(name)
    if values.is_floating_point() and not values.float().isfinite().all():
        raise QuantkitError(f"{name} holds NaN or infinite values")
    return values


def _look(name: str, read: Callable[[], torch.Tensor], zeros: list[str]) -> None:
    """Add `name` to `zeros` if the matrix says nothing; a vector of zeros is a bias, or a norm of Gemma's."""
    values = read()
    if values.ndim > 1 and not values.any():
        zeros.append(name)


def _errors_of(read: Callable[[], Any]) -> list[str]:
    try:
        read()
    except QuantkitError as error:
        return [error.message]
    return []


def _check_scales(checkpoint: Checkpoint, name: str) -> list[str]:
    """Which of a packed linear's tensors hold values that are no numbers."""
    if not checkpoint.is_quantized(name):
        return []
    linear = name.removesuffix(".weight")
    try:
        parts = checkpoint.parts(name)
    except QuantkitError as error:
        return [error.message]
    return [
        f"{linear}.{part} holds NaN or infinite values"
        for part, tensor in parts.items()
        if tensor.is_floating_point() and not tensor.float().isfinite().all()
    ]
