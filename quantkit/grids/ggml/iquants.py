"""The i-quants of 2 and 3 bits: magnitudes from a code book, eight or four weights at a time, and signs
(quantize_row_iq2_xxs_impl to quantize_row_iq3_s_impl).

A code is twice the digit of a magnitude, plus one if the weight is negative. Some types store seven signs of
eight weights: then an even number of the eight is negative.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.ggml import codebook
from quantkit.grids.ggml.block import BlockGrid, BlockParams, Blocks, Encoded, half, join, split
from quantkit.grids.ggml.codebook import CodeBook, nearest_neighbour
from quantkit.grids.ggml.kquants import SUPER_BLOCK, error_weights, mean_square
from quantkit.grids.ggml.nearest import SIGNS, VectorSearch
from quantkit.grids.ggml.search import finite, make_qp, over, single, square_root, times, total
from quantkit.grids.grid import by_rows, each_row, map_rows
from quantkit.grids.levels import usable

LARGEST_SCALE = 15
RANGES = (0.6, 0.75, 0.9, 1.05, 1.2)  # shares of the largest level that the largest weight is to have


@dataclass(frozen=True)
class Search:
    """Settings of C's search for the scale of a sub-block with magnitudes of 1, 3, 5 … times the scale.

    tries, step: try scales by which the largest weight becomes `2 base - 1 + step k`, k = -tries .. tries.
    epsilon: sub-blocks with smaller weights become zero. fitted: make_qp's result replaces the largest
    weight. again: vectors to choose again for the best scale: `all`, all if `any` was not in the book, or
    `each` that was not. power: factor of the mean square in error weights. fudge: factor of the stored d.
    """

    tries: int
    step: float
    epsilon: float
    again: str = "each"
    power: float = 2.0
    fudge: float = 1.0
    fitted: bool = False


@dataclass(frozen=True)
class CodeBookGrid(BlockGrid):
    """Values `d (scale + 1/2) unit magnitude`, each with a sign. distances: `reach` of the CodeBook. even: of
    eight signs an even number is negative. unweighted: ggml can also encode without importance."""

    distances: int = 2
    unit: float = 0.25
    even: bool = False
    unweighted: bool = True
    search: Search = Search(9, 0.1, 1e-15)
    scale_range = 0.5, LARGEST_SCALE + 0.5

    vector_size = SIGNS

    def book(self, device: torch.device | str = "cpu") -> CodeBook:
        """Return the code book on a device."""
        return codebook.named(self.name, self.distances, torch.device(device))

    def levels(self, codes: Tensor) -> Tensor:
        magnitudes = self.book(codes.device).magnitudes * self.unit
        table = torch.stack([magnitudes, -magnitudes], 1).flatten()
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    _level = levels

    def codes(self, levels: Tensor, out: Tensor) -> None:
        magnitudes = self.book(levels.device).magnitudes
        middles = (magnitudes[1:] + magnitudes[:-1]) * (self.unit / 2)
        out.copy_(torch.bucketize(levels.abs(), middles).mul_(2).add_(levels < 0))

    def fit_matrix(self, weight: Tensor, importance: Tensor | None = None) -> BlockParams:
        """Return parameters `[out, groups]` for `weight [out, in]`, found faster than by ggml: scales suit
        the magnitudes, whether or not the vectors are in the book (docs/measurements/gguf.md)."""
        blocks = weight.reshape(-1, self.sub_size).abs()
        cost = weight.new_ones(weight.shape[1]) if importance is None else importance
        weights = each_row(cost, len(weight)).reshape(-1, self.sub_size)
        step = torch.empty_like(blocks[:, 0])
        by_rows(self._steps_of, step, blocks, weights)
        step = step.view(len(weight), -1, self.group_size // self.sub_size)
        d = half(step.amax(2) / (LARGEST_SCALE + 0.5))
        return BlockParams(d, self._integers(step / usable(d)[..., None]))

    def _steps_of(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return each row's best step, `[rows]`, if every magnitude is rounded on its own."""
        table = self.book(x.device).magnitudes * self.unit
        middles = (table[1:] + table[:-1]) / 2
        largest = x.amax(1)
        best, steps = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
        for share in RANGES:
            step = usable(largest / (table[-1] * share))
            level = table[torch.bucketize(x / step[:, None], middles)]
            weighed = weights * level
            step = (weighed * x).sum(1) / (weighed * level).sum(1)
            error = (level * step[:, None]).sub_(x).square_().mul_(weights).sum(1)
            better = error < best
            best, steps = torch.where(better, error, best), torch.where(better, step, steps)
        return steps

    def search_in(self, metric: Tensor) -> VectorSearch:
        """Return a search for the nearest vectors in `metric [vector_size, vector_size]`. Its methods
        `nearest(y, start)` and `cost(missed)` take levels `[vector_size, n]`."""
        return VectorSearch(self.book(metric.device), self.unit, self.even, metric)

    def moved(self, params: BlockParams, k: int, change: Tensor | int) -> BlockParams:
        """Return parameters in which the scale of sub-block k grows by `change`, `[rows]` or one number."""
        scales = params.scales.clone()
        scales[:, k] = (scales[:, k] + change).clamp_(*self.scale_range)
        return BlockParams(params.d, scales)

    def _integers(self, scale: Tensor) -> Tensor:
        return scale.sub_(0.5).round_().add_(0.5).clamp_(*self.scale_range)

    def round(self, weight: Tensor, params: BlockParams) -> Tensor:
        """Return codes of the vectors with the least squared error, uint8 `[rows, group_size]`."""
        search = self.search_in(torch.eye(SIGNS, device=weight.device))

        def work(rows: Tensor, step: Tensor) -> Tensor:
            y = rows.unflatten(1, (-1, self.sub_size)) / step[..., None]
            levels = search.nearest(y.reshape(-1, SIGNS).t()).t().reshape(rows.shape)
            codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
            self.codes(levels, codes)
            return codes

        return map_rows(work, torch.uint8, weight, usable(params.steps()[0]))

    def _encode(self, blocks: Blocks) -> Encoded:
        n = blocks.x.shape[1]
        x, weights = split(blocks.x, self.sub_size), split(self._weights(blocks), self.sub_size)
        negative = x < 0
        size = torch.where(negative, -x, x)
        if self.even:
            _make_even(size, negative, weights * x * x)
        scale, digits, empty = _SubBlocks(self, size, weights).fit()
        negative = (negative ^ (scale < 0)) & ~empty
        scale = scale.abs_().view(-1, n)
        d = scale.amax(0) / (2 * LARGEST_SCALE + 1)
        factor = finite(over(1, d))
        scales = (scale * factor).sub_(1).mul_(0.5).round_().clamp_(0, LARGEST_SCALE).add_(0.5)
        yield BlockParams(half(d * self.search.fudge), scales.t())
        yield join(digits.mul_(2).add_(negative), n)

    def _weights(self, blocks: Blocks) -> Tensor:
        """Return error weights: x²; with importance, times the root of x² plus the mean square."""
        x, importance = blocks.x, blocks.importance
        power = mean_square(x, self.search.power)
        if importance is None and self.unweighted:
            return x * x if self.book().size == 4 else x * x + power * 0.25
        return error_weights(x, torch.ones_like(x) if importance is None else importance, power)


def _make_even(size: Tensor, negative: Tensor, cost: Tensor) -> None:
    """Flip the cheapest sign of every eight weights of which an odd number is negative, in place; the flipped
    weight's `size` becomes negative."""
    cost, signs, sizes = (part.unflatten(0, (-1, SIGNS)) for part in (cost, negative, size))
    odd = signs.sum(1, keepdim=True) % 2 == 1
    cheapest = (cost == cost.amin(1, keepdim=True)).cumsum(1)
    chosen = odd & (cheapest == 1) & (cheapest.cumsum(1) == 1)
    signs ^= chosen
    sizes.copy_(torch.where(chosen, -sizes, sizes))


class _SubBlocks:
    """Sub-blocks in the search, as columns: `size` and `weights`, both `[sub_size, n]`."""

    def __init__(self, grid: CodeBookGrid, size: Tensor, weights: Tensor):
        self.search, self.book = grid.search, grid.book(size.device)
        self.size, self.weights = size, weights
        self.digits = self.book.digits.float()
        self.odd = self.digits * 2 + 1
        self.vectors = split(size, self.book.size)  # [vector_size, vectors of a sub-block * n]
        self.roots = split(square_root(weights), self.book.size)
        self.weighted = weights * size

    def fit(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return signed scale `[n]`, digits `[sub_size, n]` and which sub-blocks are zero; their scale and
        digits are 0."""
        search, book = self.search, self.book
        largest = self.size.amax(0)
        empty = largest < search.epsilon
        limit = 2 * book.base - 1
        scale = largest / limit
        if search.fitted:
            scale = make_qp(self.size, self.weights, book.base + 1)[0]
            largest = scale * book.base
            empty |= ~(largest > 0)
        largest = largest.masked_fill(empty, 1)
        best = torch.zeros_like(scale)
        digits = torch.zeros_like(self.size)
        vectors = len(self.size) // book.size, len(scale)
        outside = torch.full(vectors, search.again != "each", device=scale.device)
        for k in range(-search.tries, search.tries + 1):
            factor = over(single(limit, times(search.step, k)), largest)
            found, off = self._choose(factor, over(1, factor))
            sum_qx, sum_q2 = self._sums(found)
            better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
            refitted = sum_qx / sum_q2
            scale = torch.where(better, refitted, scale)
            best = torch.where(better, refitted * sum_qx, best)
            digits = torch.where(better, found, digits)
            outside = torch.where(better, off, outside)
        again = outside.any(0) if search.again != "all" else torch.ones_like(empty)
        again &= scale > 0
        found, _ = self._choose(over(1, scale), scale)
        which = again & (outside if search.again == "each" else torch.ones_like(outside))
        digits = torch.where(which.repeat_interleave(book.size, 0), found, digits)
        sum_qx, sum_q2 = self._sums(digits)
        scale = torch.where(again & (sum_q2 > 0), sum_qx / sum_q2, scale)
        return scale.masked_fill_(empty, 0), digits.masked_fill_(empty, 0), empty

    def _choose(self, factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the digits of sizes times `factor`, and which rounded vectors are not in the book,
        `[vectors, n]`; these are replaced by a neighbour in the book, chosen at `scale`."""
        book, count = self.book, len(self.size) // self.book.size
        digits = (self.size * finite(factor)).sub_(1).mul_(0.5).round_().clamp_(0, book.base - 1)
        digits = split(digits, book.size)
        number = book.number(digits).long()
        off = (book.found[number] < 0).nonzero()[:, 0]
        x, roots = self.vectors.index_select(1, off), self.roots.index_select(1, off)
        places = nearest_neighbour(book, self.odd, number[off], x, roots, scale.repeat(count)[off])
        digits.index_copy_(1, off, self.digits.index_select(1, places))
        outside = torch.zeros(len(number), dtype=torch.bool, device=number.device)
        outside[off] = True
        return join(digits, factor.shape[0]), outside.view(count, -1)

    def _sums(self, digits: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ w q x and Σ w q² over sub-blocks, q = 1, 3, 5 …"""
        q = digits * 2 + 1
        return total(self.weighted * q), total((self.weights * q).mul_(q))


GRIDS = {
    "IQ2_XXS": CodeBookGrid(
        "IQ2_XXS", 2, SUPER_BLOCK, even=True, unweighted=False,
        search=Search(6, 0.1, 1e-15, "all", power=1.0, fitted=True),
    ),
    "IQ2_XS": CodeBookGrid(
        "IQ2_XS", 2, SUPER_BLOCK, 16, even=True, unweighted=False, search=Search(9, 0.1, 1e-15, power=1.0)
    ),
    "IQ2_S": CodeBookGrid(
        "IQ2_S", 2, SUPER_BLOCK, 16, distances=1, search=Search(9, 0.1, 1e-8, fudge=0.9875)
    ),
    "IQ3_XXS": CodeBookGrid(
        "IQ3_XXS", 3, SUPER_BLOCK, even=True, unit=0.5, search=Search(15, 0.2, 1e-8, fudge=1.0125)
    ),
    "IQ3_S": CodeBookGrid(
        "IQ3_S", 3, SUPER_BLOCK, distances=3, unit=2.0, search=Search(9, 0.2, 1e-45, "any", fudge=1.033)
    ),
}  # fmt: skip
