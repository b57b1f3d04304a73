"""Flow: all data that passes from block to block for a batch of tokens, packed into one tensor.

In most models the flow is the hidden states `[batch, tokens, hidden]`. Some models pass several streams
(`[streams, batch, tokens, hidden]` in Gemma 3n, `[batch, tokens, streams, hidden]` with hyper-connections),
need the ids in their blocks (embeddings per layer, routing by hash), or let later blocks read data of earlier
ones (keys and values, chosen tokens, a router's states). Then the flow is `[batch, tokens, width]`: streams,
ids and such data side by side. Code that stores, moves and splits hidden states handles all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import PyTree, TreeSpec, tree_flatten, tree_unflatten

DIGITS, BASE = 3, 256  # an integer is stored as digits / 256, which are exact in any floating-point format


@dataclass(frozen=True)
class Part:
    """A tensor of the flow. batch, tokens: its axes with these; rest: sizes of the other axes in order.
    whole: it holds integers, such as ids or positions."""

    batch: int
    tokens: int
    rest: tuple[int, ...]
    whole: bool = False

    @staticmethod
    def between(small: Sequence[int], more_rows: Sequence[int], more_tokens: Sequence[int]) -> Part | None:
        """Return the Part of a tensor from its shapes for a small batch, for more rows and for more tokens;
        None unless exactly one axis grows each time."""
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
    def left(tensor: Tensor, rows: int, tokens: int) -> Part:
        """Return the Part of a tensor that a block leaves for others: keys or values
        `[batch, heads, tokens, head]` or other axes after the batch. Raises ValueError if no axis has the
        number of tokens."""
        shape = tensor.shape
        by_tokens = [axis for axis, size in enumerate(shape) if axis and size == tokens]
        if not by_tokens or shape[0] != rows:
            raise ValueError(f"{list(shape)} of {rows} rows and {tokens} tokens")
        usual = len(shape) - 2
        axis = usual if usual in by_tokens else by_tokens[0]
        rest = tuple(size for other, size in enumerate(shape) if other not in (0, axis))
        return Part(0, axis, rest, not tensor.is_floating_point())

    @property
    def width(self) -> int:
        """Return the number of columns that the tensor takes in the flow."""
        return math.prod(self.rest) * (DIGITS if self.whole else 1)

    def pack(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor as columns `[batch, tokens, width]`."""
        moved = tensor.movedim((self.batch, self.tokens), (0, 1))
        moved = digits(moved).to(dtype) if self.whole else moved
        return moved.reshape(*moved.shape[:2], self.width)

    def unpack(self, columns: Tensor) -> Tensor:
        """Invert `pack`: return the tensor of columns `[batch, tokens, width]`."""
        if self.whole:
            columns = whole_numbers(columns.reshape(*columns.shape[:2], *self.rest, DIGITS))
        moved = columns.reshape(*columns.shape[:2], *self.rest)
        return moved.movedim((0, 1), (self.batch, self.tokens)).contiguous()


IDS = Part(0, 1, (), whole=True)


@dataclass
class Flow:
    """The flow of a model. hidden: the Part of its hidden states; by_ids: its blocks also need the ids."""

    hidden: Part = Part(0, 1, ())
    by_ids: bool = False
    _left: dict[tuple[int, int], tuple[list[Part], TreeSpec]] = field(default_factory=dict)

    def pack(self, index: int, hidden: Tensor, ids: Tensor | None, left: PyTree) -> Tensor:
        """Return the flow that enters block `index`. left: tree of tensors that earlier blocks left, `()` for
        none. Raises ValueError if a tensor in it has no axis of tokens."""
        parts, tensors = [self.hidden], [hidden]
        if self.by_ids:
            parts, tensors = [*parts, IDS], [*tensors, ids.to(hidden.device)]
        leaves, spec = tree_flatten(left)
        rows, tokens = (hidden.shape[axis] for axis in (self.hidden.batch, self.hidden.tokens))
        others = [Part.left(leaf, rows, tokens) for leaf in leaves]
        columns = [
            part.pack(tensor, hidden.dtype)
            for part, tensor in zip([*parts, *others], [*tensors, *leaves], strict=True)
        ]
        flow = torch.cat(columns, -1) if columns[1:] else columns[0]
        self._left[index, flow.shape[-1]] = others, spec
        return flow

    def unpack(self, index: int, flow: Tensor) -> tuple[Tensor, Tensor | None, PyTree]:
        """Invert `pack`: return hidden states, ids and `left`; `left` is () if none was packed."""
        others, spec = self._left.get((index, flow.shape[-1]), ([], None))
        parts = [self.hidden, *[IDS] * self.by_ids, *others]
        columns = flow.split([part.width for part in parts], -1)
        hidden, *extra = (part.unpack(column) for part, column in zip(parts, columns, strict=True))
        ids = extra.pop(0) if self.by_ids else None
        last = flow.shape[1] - 1  # positions of a flow that was cut may lie after its end
        extra = [x if x.is_floating_point() else x.clamp(max=last) for x in extra]
        return hidden, ids, tree_unflatten(extra, spec) if spec else ()


def digits(numbers: Tensor) -> Tensor:
    """Return the digits `[..., DIGITS]` of integers, as float32 between 0 and 1."""
    places = BASE ** torch.arange(DIGITS, device=numbers.device)
    return (numbers[..., None] // places % BASE).float() / BASE


def whole_numbers(values: Tensor) -> Tensor:
    """Invert `digits`."""
    places = BASE ** torch.arange(DIGITS, device=values.device)
    return ((values.float() * BASE).round().long() * places).sum(-1)
