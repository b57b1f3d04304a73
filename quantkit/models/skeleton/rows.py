"""Embedding and head on disk: their rows are read when they are needed.

With a vocabulary of 150,000 tokens, embedding and head are larger than everything else that a job keeps in
memory. But an embedding looks up one row per token, and a head may multiply by SLICE_BYTES of its rows at a
time. As long as the weight of such a module is on the meta device, the module reads its rows: from the
checkpoint, or from what a job has made of them (`install`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SLICE_BYTES = 1 << 25  # of a head's rows, in the model's dtype
Rows = Callable[[slice], Tensor]  # returns these rows of a matrix, in the model's dtype, checked


def slices(weight: Tensor) -> Iterator[slice]:
    """Yield all rows of a matrix `[rows, width]`, SLICE_BYTES at a time."""
    count, step = len(weight), max(1, SLICE_BYTES // (weight.shape[1] * weight.itemsize))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def can_stay(module: nn.Module, device: torch.device) -> bool:
    """Return whether a module can leave its weight on disk: an embedding or a plain linear, on a CPU."""
    return device.type == "cpu" and (isinstance(module, nn.Embedding) or type(module) is nn.Linear)


def stay_on_disk(module: nn.Embedding | nn.Linear, rows: Rows) -> None:
    """Make an embedding or a head read the rows of its weight."""
    module.forward = partial(_look_up if isinstance(module, nn.Embedding) else _multiply, module, rows)


def install(model: nn.Module, names: Collection[str], rows: Rows, device: torch.device) -> None:
    """Replace a matrix of the model, which has these names in it. It stays on disk if all its modules can
    leave it there."""
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    values = getattr(*owners[0]).to("meta")
    for owner, leaf in owners:  # free the old tensor before the new one is allocated
        setattr(owner, leaf, None)
    if all(can_stay(owner, device) for owner, _ in owners):
        for owner, _ in owners:
            stay_on_disk(owner, rows)
    else:
        values = torch.empty_like(values, device=device)
        for part in slices(values):
            values[part] = rows(part)
    parameter = nn.Parameter(values, requires_grad=False)
    for owner, leaf in owners:
        setattr(owner, leaf, parameter)


def _look_up(embedding: nn.Embedding, rows: Rows, ids: Tensor) -> Tensor:
    """Return an embedding's output with the rows of the ids in place of its weight."""
    whole, padding = embedding.weight, embedding.padding_idx
    if not whole.is_meta:
        return type(embedding).forward(embedding, ids)
    distinct, positions = ids.unique(return_inverse=True)
    few = torch.cat([rows(slice(row, row + 1)) for row in distinct.tolist()])
    embedding.weight, embedding.padding_idx = nn.Parameter(few, requires_grad=False), None
    try:
        return type(embedding).forward(embedding, positions)
    finally:
        embedding.weight, embedding.padding_idx = whole, padding


def _multiply(head: nn.Linear, rows: Rows, hidden: Tensor) -> Tensor:
    """Return a head's logits, computed from SLICE_BYTES of its rows at a time."""
    if not head.weight.is_meta:
        return nn.Linear.forward(head, hidden)
    logits = hidden.new_empty(*hidden.shape[:-1], head.out_features)
    for part in slices(head.weight):
        bias = None if head.bias is None else head.bias[part]
        logits[..., part] = linear(hidden, rows(part), bias)
    return logits
