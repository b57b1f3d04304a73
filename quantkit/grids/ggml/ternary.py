"""TQ1_0 and TQ2_0: one scale for 256 weights of -1, 0 and 1, for models that were trained so
(quantize_row_tq1_0_ref, quantize_row_tq2_0_ref)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.grids.ggml.block import BlockGrid, Blocks
from quantkit.grids.ggml.kquants import SUPER_BLOCK
from quantkit.grids.ggml.legacy import BELOW_HALF, scaled
from quantkit.grids.ggml.params import Scale, half


class TernaryGrid(BlockGrid):
    """`d * (code - 1)`; d is the largest magnitude. No code is chosen by importance."""

    weighted = False

    def _encode(self, blocks: Blocks) -> tuple[Scale, Tensor]:
        d = blocks.x.abs().amax(0)
        codes = scaled(blocks.x, d, 0.0)
        codes += torch.full((), BELOW_HALF, device=codes.device).copysign(codes)  # halves go away from zero
        return Scale(half(d)), codes.trunc_().add_(self.offset)

    def _nearest(self, level: Tensor) -> Tensor:
        return level.round_().clamp_(-1, 1).add_(self.offset)

    def snap(self, target: Tensor, out: Tensor) -> None:
        """The nearest of the codes 0, 1 and 2, into `out`."""
        torch.round(target, out=out).clamp_(0, 2)


GRIDS = {name: TernaryGrid(name, 2, SUPER_BLOCK, SUPER_BLOCK, offset=1) for name in ("TQ1_0", "TQ2_0")}
