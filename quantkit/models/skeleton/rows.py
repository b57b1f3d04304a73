"""Embedding and head on disk: their rows are read when they are needed.

With a vocabulary of 150,000 tokens, embedding and head are larger than everything else that a job keeps in
memory. But an embedding looks up one row per token, and a head may multiply by SLICE_BYTES of its rows at a
time. As long as the weight of such a module is on the meta device, the module reads its rows from the
checkpoint. Once a weight is installed, the module computes with the installed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def stay_on_disk(module: nn.Embedding | nn.Linear, rows: Rows) -> None:
    """Make an embedding or a head read the rows of its weight. All rows of an embedding are checked at once,
    those of a head whenever it computes."""
    if isinstance(module, nn.Embedding):
        for part in slices(module.weight):
            rows(part)
    module.forward = partial(_look_up if isinstance(module, nn.Embedding) else _multiply, module, rows)


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
