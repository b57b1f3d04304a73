"""Flow: all that passes from block to block for a batch of tokens, side by side in one tensor.

Most models pass hidden states `[batch, tokens, hidden]`, and these are the flow. Others pass several streams
(`[streams, batch, tokens, hidden]` in Gemma 3n, `[batch, tokens, streams, hidden]` with hyper-connections),
give their blocks what depends on the ids (embeddings per layer, routing by hash), or let later blocks read
what earlier ones have left (keys and values). Then the flow is `[batch, tokens, width]`: streams, ids and
what was left one after another, so that whoever keeps, moves and cuts hidden states does so with all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DIGITS, BASE = 3, 256  # of an id: fractions of 256, which every floating point format holds exactly


@dataclass(frozen=True)
class Part:
    """A tensor of the flow. batch, tokens: its axes of these; rest: sizes of the others, in their order."""

    batch: int
    tokens: int
    rest: tuple[int, ...]

    @staticmethod
    def between(small: Sequence[int], more_rows: Sequence[int], more_tokens: Sequence[int]) -> Part | None:
        """That of a tensor whose shape was `small`, was another with more rows in the batch, and another
        with more tokens; None where not one axis told of each."""
        shapes = (small, more_rows, more_tokens)
        if len({len(shape) for shape in shapes}) > 1:
            return None
        rows, tokens = (
            [axis for axis, (a, b) in enumerate(zip(small, other, strict=True)) if a != b]
            for other in shapes[1:]
        )
        if len(rows) != 1 or len(tokens) != 1 or rows == tokens:
            return None
        rest = tuple(size for axis, size in enumerate(small) if axis not in (rows[0], tokens[0]))
        return Part(rows[0], tokens[0], rest)

    @staticmethod
    def of_keys(shape: Sequence[int], rows: int, tokens: int) -> Part | None:
        """That of keys or values, `[batch, heads, tokens, head]` or with other axes beside rows and tokens."""
        by_tokens = [axis for axis, size in enumerate(shape) if axis and size == tokens]
        if not by_tokens or shape[0] != rows:
            return None
        usual = len(shape) - 2
        axis = usual if usual in by_tokens else by_tokens[0]
        return Part(0, axis, tuple(size for other, size in enumerate(shape) if other not in (0, axis)))

    @property
    def width(self) -> int:
        """Columns in the flow."""
        return math.prod(self.rest)

    def pack(self, tensor: Tensor) -> Tensor:
        """`[batch, tokens, width]`."""
        moved = tensor.movedim((self.batch, self.tokens), (0, 1))
        return moved.reshape(*moved.shape[:2], self.width)

    def unpack(self, columns: Tensor) -> Tensor:
        """The tensor of its columns `[batch, tokens, width]`."""
        moved = columns.reshape(*columns.shape[:2], *self.rest)
        return moved.movedim((0, 1), (self.batch, self.tokens)).contiguous()


IDS = Part(0, 1, (DIGITS,))


def digits(ids: Tensor) -> Tensor:
    """`[batch, tokens, DIGITS]` of ids `[batch, tokens]`, float32 between 0 and 1."""
    places = BASE ** torch.arange(DIGITS, device=ids.device)
    return (ids[..., None] // places % BASE).float() / BASE


def ids_of(found: Tensor) -> Tensor:
    """Inverse of `digits`."""
    places = BASE ** torch.arange(DIGITS, device=found.device)
    return ((found.float() * BASE).round().long() * places).sum(-1)
