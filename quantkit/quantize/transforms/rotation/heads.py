"""R2: heads whose values may be turned (SpinQuant, arXiv:2405.16406, section 3.2).

Attention takes averages of values: if the rows of v that make a head's values are multiplied by Rᵀ, its
outputs are, and the columns of o that read them take R. Query heads of a group share their values' rows.
Which rows of which linear those are is known from AWQ's folds; whether nothing between them looks at single
channels (as a gate does) is seen when the block is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from quantkit.quantize.transforms.fold import Fold
from quantkit.quantize.transforms.probe import Probe

WIDTHS = ("v_head_dim", "head_dim", "global_head_dim")


@dataclass(frozen=True)
class Heads:
    """values: linear that makes them; rows: `[heads, width]` of it. reads: weights of the linears that read
    the heads one beside the other."""

    values: str
    rows: Tensor
    reads: tuple[str, ...]

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.rows.shape[1]


def candidates(probe: Probe, folds: Sequence[Fold], config: PretrainedConfig) -> Iterator[Heads]:
    """What may be heads; to be proven."""
    sizes = [getattr(config, name, None) for name in WIDTHS]
    count = getattr(config, "num_attention_heads", 0)
    sizes.append(config.hidden_size // count if isinstance(count, int) and count else None)
    for fold in folds:
        if not isinstance(probe.block.get_submodule(fold.producer.name), nn.Linear):
            continue
        if any(axis != -1 for axis in fold.columns.values()):
            continue
        for width in dict.fromkeys(size for size in sizes if isinstance(size, int) and size > 1):
            rows = _heads(fold.producer.rows.cpu(), width)
            if rows is not None:
                yield Heads(fold.producer.name, rows, tuple(fold.columns))


def _heads(rows: Tensor, width: int) -> Tensor | None:
    """The rows of every head once, `[heads, width]`, if channels `rows [in]` are heads of so many rows."""
    if len(rows) % width:
        return None
    found = rows.view(-1, width)
    if not torch.equal(found, found[:, :1] + torch.arange(width)):
        return None
    return torch.unique(found, dim=0)
