"""IQ4_NL and IQ4_XS: 4-bit codes of sixteen unevenly spaced values (quantize_row_iq4_nl_impl)."""

from functools import cache

import torch
from torch import Tensor

from quantkit.grids.ggml.block import BlockGrid, BlockParams, Blocks, Encoded, half, join, split
from quantkit.grids.ggml.kquants import weights_of
from quantkit.grids.ggml.search import EPSILON, extreme, inverse, over, refitted, total
from quantkit.grids.levels import TableLevels, constant, usable

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCK = 32
TRIES = 7


@cache
def _codes_by_half(device: torch.device) -> Tensor:
    """Return the code of the nearest value for each `floor(2 x)` from -256 to 255; midpoints round up."""
    values = torch.tensor(VALUES)
    twice = torch.arange(-256, 256)
    return torch.bucketize(twice, values[1:] + values[:-1], right=True).to(device, torch.float32)


def nearest_codes(x: Tensor) -> Tensor:
    """Return the codes (float32) of the nearest of VALUES; changes `x`. NaN gets the last code, as in C."""
    halves = x.mul_(2).floor_().clamp_(-256, 255).add_(256).nan_to_num_(nan=511.0).to(torch.int32)
    return _codes_by_half(x.device).index_select(0, halves.flatten()).view(x.shape)


def levels(codes: Tensor) -> Tensor:
    """Return the VALUES of codes, float32."""
    return constant(VALUES, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def search(x: Tensor, weights: Tensor) -> Tensor:
    """Return the scale of every column of `x [32, groups]`: the best of sixteen around the one that fits the
    largest weight (`refitted`)."""
    largest = extreme(x)
    zero = largest.abs() < EPSILON
    largest = largest.masked_fill(zero, 1)

    def sums(factor: Tensor) -> tuple[Tensor, Tensor]:
        value = levels(nearest_codes(x * factor))
        product = weights * value
        return total(product * x), total(product.mul_(value))

    around = (over(k + VALUES[0], largest) for k in range(-TRIES, TRIES + 1))
    scale, _ = refitted(sums, (over(1, -largest / VALUES[0]), *around))
    return scale.masked_fill_(zero, 0)


class TableGrid(TableLevels, BlockGrid):
    """Values `step * VALUES[code]`. Levels count half steps from the value 1: midpoints are integers."""

    level_table = tuple(2.0 * (value - 1) for value in VALUES)
    _level, _nearest = staticmethod(levels), staticmethod(nearest_codes)

    def in_levels(self, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return step and low of levels: half a step, and low with the value 1 at level 0. The arguments are
        those of values `step * VALUES[code] - low`."""
        return usable(step / 2), low - step


class Iq4NlGrid(TableGrid):
    """IQ4_NL: 32 weights share one scale."""

    def _encode(self, blocks: Blocks) -> Encoded:
        d = search(blocks.x, weights_of(blocks))
        yield BlockParams(half(d))
        yield nearest_codes(blocks.x * inverse(d))


class Iq4XsGrid(TableGrid):
    """IQ4_XS: eight signed 6-bit scales for 256 weights. As in C, d becomes a float16 after rounding."""

    scale_range = -32, 31

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x = split(blocks.x, BLOCK)
        scale = search(x, split(weights_of(blocks), BLOCK)).view(-1, n)
        d = extreme(scale) / -32
        scales = (scale * inverse(d)).round_().clamp_(-32, 31).add_(0.0)
        yield BlockParams(half(d), scales.t())
        yield join(nearest_codes(x * inverse((d * scales).flatten())), n)


GRIDS = {
    "IQ4_NL": Iq4NlGrid("IQ4_NL", 4, BLOCK),
    "IQ4_XS": Iq4XsGrid("IQ4_XS", 4, 256),
}
