"""Predictions of the teacher: its final hidden states for all training tokens, in a mapped file.

The teacher runs once, block by block, and is never in memory whole. Hidden states are hidden-size wide, not
vocabulary-size: the teacher's logits are formed from them again where they are needed, by its own norm and
head.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.models.skeleton import Skeleton
from quantkit.quantize.calibrate import walk
from quantkit.quantize.prepare import plan

GROUP_TOKENS = 1 << 18  # whose states are in memory at a time: weights are read once for each group

Prediction = tuple[Tensor, Tensor]  # logits [batch, tokens, vocabulary]; inputs of the head, [… , hidden]


class Targets:
    """Training and held-out sequences. ids: int64 `[sequences, tokens]`, of which so many at the end are
    `held_out`; states: `[sequences, tokens, hidden]` in the teacher's precision, mapped from a file."""

    def __init__(self, skeleton: Skeleton, ids: Tensor, held_out: int, states: Tensor):
        self._skeleton = skeleton
        self.ids, self.held_out, self.states = ids, held_out, states

    @property
    def trained(self) -> int:
        """Return the number of training sequences."""
        return len(self.ids) - self.held_out

    def predictions(self, sequences: Tensor) -> Prediction:
        """Return the teacher's predictions for sequences `[batch]`, on its device."""
        with entering(self._skeleton.model) as found:
            logits = torch.stack([self._skeleton.logits(self.states[index]) for index in sequences.tolist()])
        return logits, torch.cat(found)


@contextmanager
def entering(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the model's head, `[batch, tokens, hidden]`, during the context."""
    found: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, args: found.append(args[0]))
    try:
        yield found
    finally:
        hook.remove()


def nbytes(skeleton: Skeleton, tokens: int) -> int:
    """Return the size of the file in bytes."""
    return tokens * skeleton.checkpoint.text_config.hidden_size * skeleton.dtype.itemsize


def gather(
    skeleton: Skeleton, ids: Tensor, held_out: int, path: Path,
    listen: Callable[[int, int], None] = lambda done, total: None,
) -> Targets:  # fmt: skip
    """Return the targets for `ids [sequences, tokens]`; an existing file at `path` is used.

    Parameters outside the blocks are loaded. The file appears whole or not at all.
    """
    shape = (*ids.shape, skeleton.checkpoint.text_config.hidden_size)
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        states, done = _mapped(temporary, shape, skeleton.dtype), 0
        groups = ids.split(max(1, GROUP_TOKENS // ids.shape[1]))
        blocks = len(skeleton.blocks) * len(groups)
        for number, group in enumerate(groups):
            batches = group.split(plan.default_batch_size(ids.shape[1]))
            base = number * len(skeleton.blocks)
            for hidden in walk.through(
                skeleton, batches, entered=lambda index, base=base: listen(base + index, blocks)
            ):
                states[done : done + len(hidden)] = hidden.cpu()
                done += len(hidden)
        listen(blocks, blocks)
        del states
        os.replace(temporary, path)
    return Targets(skeleton, ids, held_out, _mapped(path, shape, skeleton.dtype))


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory is the file."""
    size = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
