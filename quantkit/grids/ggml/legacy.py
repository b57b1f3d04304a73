"""The types with ggml blocks of 32 weights and one scale: Q4_0, Q5_0, Q8_0, and Q4_1, Q5_1 with a min
(quantize_row_q4_0_ref to quantize_row_q5_1_impl)."""

import torch
from torch import Tensor

from quantkit.grids.ggml.block import BlockGrid, BlockParams, Blocks, Encoded, half
from quantkit.grids.ggml.kquants import error_weights
from quantkit.grids.ggml.search import WITH_IMPORTANCE, extreme, inverse, lowest, make_qkx, make_qx, total

BLOCK = 32
BELOW_HALF = 0.5 - 2.0**-25  # the largest float32 below 0.5; adding 0.5 to it would give 1


def row_weights(blocks: Blocks) -> Tensor:
    """Return error weights from importance and the mean square of each block's whole row."""
    rows = (blocks.x * blocks.x).unflatten(1, (-1, blocks.per_row)).permute(2, 0, 1).flatten(0, 1)
    power = total(rows.contiguous()) / len(rows)
    return error_weights(blocks.x, blocks.importance, power.repeat_interleave(blocks.per_row))


def scaled(x: Tensor, d: Tensor, overflow: float) -> Tensor:
    """Return `x * (1 / d)` as in C. If `1 / d` is infinite, return `overflow` (code 0, as on x86)."""
    factor = inverse(d)
    product = x * factor
    if factor.isinf().any():
        product.masked_fill_(factor.isinf(), overflow)
    return product


class ScaleGrid(BlockGrid):
    """Q4_0, Q5_0: `d * (code - offset)`. d has the sign that gives the largest weight the lowest code."""

    def _encode(self, blocks: Blocks) -> Encoded:
        if blocks.importance is None:
            d = extreme(blocks.x) / -self.offset
            yield BlockParams(half(d))
            codes = scaled(blocks.x, d, -torch.inf).add_(self.offset + 0.5)
            yield codes.clamp_(0, 2 * self.offset - 1).trunc_()
        else:
            weights = blocks.importance if blocks.quick else row_weights(blocks)
            d, codes = make_qx(blocks.x, weights, self.offset, blocks.quick)
            yield from (BlockParams(half(d)), codes)


class ScaleAndMinGrid(BlockGrid):
    """Q4_1, Q5_1: `d * code + m`."""

    def _encode(self, blocks: Blocks) -> Encoded:
        x, levels = blocks.x, 2**self.bits - 1
        if blocks.importance is None:
            m = lowest(x)
            d = (x.amax(0) - m).add_(0.0) / levels  # never -0
            yield BlockParams(half(d), m=half(m))
            yield scaled(x - m, d, -torch.inf).add_(0.5).clamp_(0, levels).trunc_()
        else:
            d, low, codes = make_qkx(x, row_weights(blocks), levels, WITH_IMPORTANCE)
            yield from (BlockParams(half(d), m=half(-low)), codes)


class Q8Grid(BlockGrid):
    """Q8_0: `d * (code - 128)`. Importance does not change codes."""

    weighted = False

    def _encode(self, blocks: Blocks) -> Encoded:
        d = blocks.x.abs().amax(0) / 127
        yield BlockParams(half(d))
        codes = scaled(blocks.x, d, 0.0)
        codes.add_(torch.full((), BELOW_HALF, device=codes.device).copysign(codes))  # ties go away from zero
        yield codes.trunc_().add_(self.offset)


GRIDS = {
    "Q4_0": ScaleGrid("Q4_0", 4, BLOCK, offset=8),
    "Q4_1": ScaleAndMinGrid("Q4_1", 4, BLOCK),
    "Q5_0": ScaleGrid("Q5_0", 5, BLOCK, offset=16),
    "Q5_1": ScaleAndMinGrid("Q5_1", 5, BLOCK),
    "Q8_0": Q8Grid("Q8_0", 8, BLOCK, offset=128),
}
