"""The K-quants: super-blocks of 256 weights; each sub-block has its own small integer scale
(quantize_row_q2_K_ref to quantize_row_q6_K_impl)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.ggml import search
from quantkit.grids.ggml.block import BlockGrid, BlockParams, Blocks, Encoded, half, join, split
from quantkit.grids.ggml.search import WITH_IMPORTANCE, Plan, total

SUPER_BLOCK = 256
QUICK = Plan(-0.6, 0.1, 12)  # for searches of column scales, in which a fit is made many times
QUICK_WITH_IMPORTANCE = Plan(-0.9, 0.1, 18)  # half as many scales as ggml tries: no more is lost


def error_weights(x: Tensor, importance: Tensor, power: Tensor) -> Tensor:
    """Return error weights of the searches with importance: `importance * sqrt(power + x²)`."""
    return search.square_root((x * x).add_(power)).mul_(importance)


def mean_square(x: Tensor, factor: float) -> Tensor:
    """Return `factor` times the mean square of every block of `x [group_size, blocks]`."""
    return total(x * x).mul_(factor).div_(len(x))


def weights_of(blocks: Blocks) -> Tensor:
    """Return error weights: x²; with importance, times the root of x² plus twice the mean square, but in a
    sweep the importance alone."""
    if blocks.importance is None:
        return blocks.x * blocks.x
    if blocks.quick:
        return blocks.importance
    return error_weights(blocks.x, blocks.importance, mean_square(blocks.x, 2))


@dataclass(frozen=True)
class MinGrid(BlockGrid):
    """Q2_K, Q4_K, Q5_K: unsigned scales and mins up to `scale_max`.

    plan: of the search without importance. power: with importance, factor of the mean square.
    """

    scale_max: int = 63
    plan: Plan = Plan(-0.5, 0.1, 15)
    power: float = 2.0

    has_min = True

    @property
    def scale_range(self) -> tuple[int, int]:
        return 0, self.scale_max

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x = split(blocks.x, self.sub_size)
        if blocks.importance is None:
            weights, plan = self._own_weights(x), QUICK if blocks.quick else self.plan
        elif blocks.quick:  # in a sweep importance is the exact cost of an error, without ggml's factor
            weights, plan = split(blocks.importance, self.sub_size), QUICK_WITH_IMPORTANCE
        else:
            power = mean_square(blocks.x, self.power)
            weights = split(error_weights(blocks.x, blocks.importance, power), self.sub_size)
            plan = WITH_IMPORTANCE
        nmax = 2**self.bits - 1
        scale, low, searched = search.make_qkx(x, weights, nmax, plan)
        scale, low = scale.view(-1, n), low.view(-1, n)
        if blocks.importance is None:
            (d, scales), (dmin, mins) = self._multiples(scale), self._multiples(low)
        else:
            share = total(weights).view(-1, n).repeat(1, 2)
            both = search.make_qp(torch.cat([scale, low], 1), share, self.scale_max)
            (d, dmin), (scales, mins) = (part.split(n, -1) for part in both)
        d, dmin = half(d), half(dmin)
        yield BlockParams(d, scales.t(), dmin, mins.t())
        step = (d * scales).flatten()
        codes = (x + (dmin * mins).flatten()).div_(step).round_().clamp_(0, nmax)
        # every code has the same value where the step is 0: C keeps what the search had
        yield join(torch.where(step == 0, searched, codes), n)

    def _own_weights(self, x: Tensor) -> Tensor:
        """Return error weights without importance: |x|, plus the sub-block's RMS except in Q2_K."""
        if self.bits == 2:
            return x.abs()
        return x.abs().add_(search.square_root(total(x * x) / self.sub_size))

    def _multiples(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unit and the integers of which `parts [sub-blocks, blocks]` are multiples, rounded. The
        largest part gets the largest integer."""
        largest = parts.amax(0).clamp_(min=0).add_(0.0)  # never -0
        factor = search.finite(search.over(self.scale_max, largest))
        return largest / self.scale_max, (parts * factor).round_().clamp_(max=self.scale_max).add_(0.0)


@dataclass(frozen=True)
class SignedGrid(BlockGrid):
    """Q3_K and Q6_K: signed scales, no mins."""

    def _finish(self, x: Tensor, d: Tensor, scales: Tensor, searched: Tensor) -> Encoded:
        """Yield parameters, then codes rounded with them as stored. Columns whose step is 0 keep the codes of
        the search, `searched`, as in C."""
        d = half(d)
        yield BlockParams(d, scales.t())
        step = (d * scales).flatten()
        codes = (x / step).round_().clamp_(-self.offset, self.offset - 1).add_(self.offset)
        yield join(torch.where(step == 0, searched, codes), len(d))


def signed_multiples(parts: Tensor, lowest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unit and the integers of which `parts [sub-blocks, blocks]` are multiples, rounded, and the
    part of largest magnitude, which becomes `lowest` units."""
    largest = search.extreme(parts)
    factor = search.over(lowest, largest.masked_fill(largest == 0, 1))
    return search.over(1, factor), (parts * factor).round_().clamp_(lowest, -lowest - 1).add_(0.0), largest


class Q3KGrid(SignedGrid):
    """Q3_K."""

    scale_range = -32, 31

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x = split(blocks.x, self.sub_size)
        if blocks.importance is None:
            scale, searched = search.make_q3(x, self.offset)
            d, scales, largest = signed_multiples(scale.view(-1, n), self.scale_range[0])
            empty = largest == 0
            d, scales = d.masked_fill(empty, 0), scales.masked_fill(empty, -32)
        else:
            weights = split(weights_of(blocks), self.sub_size)
            scale, searched = search.make_qx(x, weights, self.offset, blocks.quick)
            d, scales = search.make_qx(scale.view(-1, n), total(weights).view(-1, n), 32)
            scales = scales.sub_(32)
        yield from self._finish(x, d, scales, searched)


class Q6KGrid(SignedGrid):
    """Q6_K."""

    scale_range = -128, 127

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x = split(blocks.x, self.sub_size)
        weights = x * x if blocks.importance is None else split(blocks.importance, self.sub_size)
        wide = blocks.quick and blocks.importance is not None
        scale, searched = search.make_qx(x, weights, self.offset, wide)
        d, scales, largest = signed_multiples(scale.view(-1, n), self.scale_range[0])
        empty = largest.abs() < search.EPSILON
        encoded = self._finish(x, d.masked_fill(empty, 0), scales.masked_fill(empty, 0), searched)
        yield next(encoded)
        yield search.clear(next(encoded), empty)


GRIDS = {
    "Q2_K": MinGrid("Q2_K", 2, SUPER_BLOCK, 16, scale_max=15, plan=Plan(-0.5, 0.1, 15, True), power=1.0),
    "Q3_K": Q3KGrid("Q3_K", 3, SUPER_BLOCK, 16, offset=4),
    "Q4_K": MinGrid("Q4_K", 4, SUPER_BLOCK, plan=Plan(-1.0, 0.1, 20)),
    "Q5_K": MinGrid("Q5_K", 5, SUPER_BLOCK),
    "Q6_K": Q6KGrid("Q6_K", 6, SUPER_BLOCK, 16, offset=32),
}
