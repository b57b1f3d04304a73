"""Embedding and head outside the memory that computes: their rows are fetched when they are needed.

With a vocabulary of 150,000 tokens, embedding and head are larger than everything else that a job keeps in
memory. But an embedding looks up one row per token, and a head may multiply by SLICE_BYTES of its rows at a
time. As long as the weight of such a module is on the meta device, the module fetches its rows: a CPU's from
the checkpoint or from what a job has made of them (`install`), an accelerator's from host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.models.machine.device import is_accelerator, pinned

SLICE_BYTES = 1 << 25  # of a head's rows, in the model's dtype
Rows = Callable[[slice], Tensor]  # returns these rows of a matrix, in the model's dtype, checked


def slices(weight: Tensor) -> Iterator[slice]:
    """Yield all rows of a matrix `[rows, width]`, SLICE_BYTES at a time."""
    count, step = len(weight), max(1, SLICE_BYTES // (weight.shape[1] * weight.itemsize))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def can_stay_away(module: nn.Module) -> bool:
    """Return whether a module computes from rows of its weight: an embedding or a plain linear."""
    return isinstance(module, nn.Embedding) or type(module) is nn.Linear


class Away(nn.Parameter):
    """A weight on the meta device. Its `device` is the one that computes: Llama 4 moves ids there."""

    def __new__(cls, like: Tensor, device: torch.device) -> Away:
        self = super().__new__(cls, like.detach().to("meta"), requires_grad=False)
        self.computing = device
        return self

    @property
    def device(self) -> torch.device:
        return self.computing


def stay_away(module: nn.Embedding | nn.Linear, rows: Rows) -> None:
    """Make an embedding or a head fetch the rows of its weight."""
    module.forward = partial(_look_up if isinstance(module, nn.Embedding) else _multiply, module, rows)


def forget(model: nn.Module) -> None:
    """Release the rows of embedding and head, which an accelerator's model keeps in host memory."""
    for module in filter(can_stay_away, model.modules()):
        if vars(module).pop("forward", None) and isinstance(module.weight, Away):
            module.weight = nn.Parameter(module.weight.detach(), requires_grad=False)


class OnHost:
    """Rows of a matrix with the shape and dtype of `like`, copied from pinned host memory to a device.

    pieces: the `slices` of the matrix. As one tensor it would take more memory: CUDA's host allocator rounds
    up to a power of two.
    """

    def __init__(self, like: Tensor, rows: Rows, device: torch.device):
        self.pieces, self.device = [pinned(rows(part), device) for part in slices(like)], device

    def __call__(self, rows: slice | Tensor) -> Tensor:
        """Return one of the slices, or the rows with these numbers, in ascending order."""
        step = len(self.pieces[0])
        if isinstance(rows, slice):
            return self.pieces[rows.start // step].to(self.device, non_blocking=True)
        rows = rows.cpu()
        within = (rows[rows // step == k] - k * step for k in range(len(self.pieces)))
        return torch.cat([piece[few] for piece, few in zip(self.pieces, within, strict=True)]).to(self.device)


def install(model: nn.Module, names: Collection[str], rows: Rows, device: torch.device) -> None:
    """Replace a matrix of the model, which has these names in it. It stays away from the device if all its
    modules can fetch its rows."""
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    values = getattr(*owners[0]).to("meta")
    for owner, leaf in owners:  # free the old tensor before the new one is allocated
        setattr(owner, leaf, None)
    away = all(can_stay_away(owner) for owner, _ in owners)
    if away and is_accelerator(device):
        rows = OnHost(values, rows, device)
    elif not away:
        values = torch.empty_like(values, device=device)
        for part in slices(values):
            values[part] = rows(part)
    if away:
        for owner, _ in owners:
            stay_away(owner, rows)
    parameter = Away(values, device) if away else nn.Parameter(values, requires_grad=False)
    for owner, leaf in owners:
        setattr(owner, leaf, parameter)


def _look_up(embedding: nn.Embedding, rows: Rows, ids: Tensor) -> Tensor:
    """Return an embedding's output with the rows of the ids in place of its weight."""
    whole, padding = embedding.weight, embedding.padding_idx
    if not whole.is_meta:
        return type(embedding).forward(embedding, ids)
    distinct, positions = ids.unique(return_inverse=True)
    if isinstance(rows, OnHost):
        few = rows(distinct)
    else:
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
