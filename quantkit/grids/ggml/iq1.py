"""IQ1_S and IQ1_M: vectors of -1, 0 and 1 from a code book, all moved up or down by an eighth
(quantize_row_iq1_s_impl, quantize_row_iq1_m_impl).

A code is the digit 0, 1 or 2, and three more where it is moved down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.grids.ggml import codebook
from quantkit.grids.ggml.block import BlockGrid, Blocks, join, split
from quantkit.grids.ggml.codebook import CodeBook, nearest_neighbour
from quantkit.grids.ggml.kquants import SUPER_BLOCK, error_weights
from quantkit.grids.ggml.params import SubHalves, half
from quantkit.grids.ggml.search import finite, over, total

DELTA = 0.125
UP = (-1 + DELTA, DELTA, 1 + DELTA)
DOWN = (-1 - DELTA, -DELTA, 1 - DELTA)
VECTOR = 8
LARGEST_SCALE = 7
DISTANCES = 3


@dataclass(frozen=True)
class OneBitGrid(BlockGrid):
    """Values `d (2 scale + 1) (digit - 1 ± 1/8)`. epsilon: a sub-block without a larger weight is zero.
    fudge: d is stored times this. unweighted: ggml encodes it without importance, too."""

    epsilon: float = 1e-12
    fudge: float = 1.125
    unweighted: bool = False
    scale_range = 0, LARGEST_SCALE

    @property
    def book(self) -> CodeBook:
        """Its code book."""
        return codebook.named("IQ1_S", DISTANCES)

    def _level(self, codes: Tensor) -> Tensor:
        table = 2 * torch.tensor(UP + DOWN, device=codes.device)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    def _weights(self, blocks: Blocks) -> Tensor:
        x, importance = blocks.x, blocks.importance
        if importance is None and self.unweighted:
            return x * x
        power = total(x * x).mul_(2 / SUPER_BLOCK)
        return error_weights(x, torch.ones_like(x) if importance is None else importance, power)

    def _encode(self, blocks: Blocks) -> tuple[SubHalves, Tensor]:
        n = blocks.x.shape[1]
        x, weights = split(blocks.x, self.sub_size), split(self._weights(blocks), self.sub_size)
        scale, digits, down = self._fit(x, weights)
        scale = scale.view(-1, n)
        d = scale.amax(0) / (2 * LARGEST_SCALE + 1)
        down = down & (d > 0).repeat(down.shape[1] // n)
        scales = (scale * finite(over(1, d))).sub_(1).mul_(0.5).round_().clamp_(0, LARGEST_SCALE).add_(0.0)
        codes = digits + 3 * down.repeat_interleave(self.sub_size // len(down), 0)
        if self.name == "IQ1_M":
            d = self._refitted(d, x, weights, codes, scales)
        return SubHalves(half(d * self.fudge), scales.t()), join(codes, n)

    def _refitted(self, d: Tensor, x: Tensor, weights: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """The d that suits codes and scales best, one weight after another."""
        n = len(d)
        q = (self._level(codes) / 2).mul_(scales.flatten().mul(2).add_(1))
        weighed = weights * q
        terms = [join(part, n) for part in (weighed * x, weighed * q)]
        sum_qx, sum_q2 = map(total, terms)
        return torch.where((d > 0) & (sum_q2 > 0), sum_qx / sum_q2, d)

    def _fit(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scale `[n]`, digits `[sub_size, n]` and what is moved down, `[1 or vectors, n]`, of sub-blocks."""
        order = torch.argsort(x, dim=0, stable=True)
        empty = x.abs().amax(0) < self.epsilon
        halves = 2 if self.name == "IQ1_M" else 1
        splits = _halves(x, weights, order) if halves == 2 else _whole(x, weights, order)
        best = x.new_full(empty.shape, -torch.finfo(torch.float32).max)
        scale = x.abs().amax(0)
        low, high, move = (torch.full(empty.shape, -1, device=x.device) for _ in range(3))
        for first, second, k, sum_qx, sum_q2 in splits:
            better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
            found = sum_qx / sum_q2
            scale = torch.where(better, found, scale)
            best = torch.where(better, found * sum_qx, best)
            for held, value in ((low, first), (high, second), (move, k)):
                held.masked_fill_(better, value)
        empty |= move < 0
        places = torch.arange(len(x), device=x.device)[:, None].expand_as(x)
        rank = torch.empty_like(order).scatter_(0, order, places)
        digits = (rank >= low).float().add_(rank >= high)
        flip = scale < 0
        digits = torch.where(flip, 2 - digits, digits)
        move = torch.where(flip, 2**halves - 1 - move, move)
        down = torch.stack([move >> halves - 1 - k & 1 for k in range(halves)]) > 0
        scale = scale.abs_().masked_fill_(empty, 1)
        scale, digits = self._on_book(x, weights, scale, digits, down)
        return scale.masked_fill_(empty, 0), digits.masked_fill_(empty, 0), down & ~empty

    def _on_book(
        self, x: Tensor, weights: Tensor, scale: Tensor, digits: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scale and digits where vectors that are not in the book have become neighbours that are."""
        book, n = self.book.to(x.device), len(scale)
        vectors = split(digits, VECTOR)
        number = book.number(vectors).long()
        off = book.found[number] < 0
        lowered = down.repeat_interleave(len(x) // VECTOR // len(down), 0).flatten()
        columns, costs = split(x, VECTOR), split(weights, VECTOR)
        for table, those in ((UP, off & ~lowered), (DOWN, off & lowered)):
            at = those.nonzero()[:, 0]
            values = torch.tensor(table, device=x.device)[book.digits]
            places = nearest_neighbour(
                book, values, number[at], columns[:, at], costs[:, at], scale.repeat(len(x) // VECTOR)[at]
            )
            vectors[:, at] = book.digits[:, places].to(vectors.dtype)
        digits = join(vectors, n)
        moved = torch.where(lowered.view(-1, n).repeat_interleave(VECTOR, 0), -DELTA, DELTA)
        q = digits - 1 + moved
        weighed = weights * q
        sum_qx, sum_q2 = total(weighed * x), total(weighed * q)
        again = off.view(-1, n).any(0) & (sum_qx > 0) & (sum_q2 > 0)
        return torch.where(again, sum_qx / sum_q2, scale), digits


Split = tuple[int, int, int, Tensor, Tensor]  # ranks where digits 1 and 2 begin, what is moved down, sums


def _whole(x: Tensor, weights: Tensor, order: Tensor) -> Iterator[Split]:
    """Every way to split the sorted weights in three, with Σ w q x and Σ w q² of either move."""
    sums = [_running((weights * x).gather(0, order)), _running(weights.gather(0, order))]
    qx, q2 = sums
    parts = []
    for low, middle, high in (UP, DOWN):
        ends = (qx - qx[0]) * low, (qx[-1] - qx) * high, middle
        parts.append((*ends, (q2 - q2[0]) * low * low, (q2[-1] - q2) * high * high))
    for i in range(len(qx)):
        for j in range(i, len(qx)):
            between_x, between_2 = qx[j] - qx[i], q2[j] - q2[i]
            for k, (low_x, high_x, middle, low_2, high_2) in enumerate(parts):
                sum_qx = (low_x[i] + between_x * middle).add_(high_x[j])
                yield i, j, k, sum_qx, (low_2[i] + between_2 * middle * middle).add_(high_2[j])


def _halves(x: Tensor, weights: Tensor, order: Tensor) -> Iterator[Split]:
    """As `_whole`, where each half of a sub-block is moved by itself."""
    sums = []
    for half_of in (order < len(x) // 2, order >= len(x) // 2):
        for terms in (weights * x, weights):
            sums.append(_running(torch.where(half_of, terms.gather(0, order), 0.0)))
    ends = [(values[2], _minus(values, 0, 1), _minus(values, 1, 2)) for values in (UP, DOWN)]
    for i in range(len(sums[0])):
        for j in range(i, len(sums[0])):
            halves = []
            for qx, q2 in (sums[:2], sums[2:]):
                both = qx[i] + qx[j]
                halves.append(
                    [
                        (qx[-1] * top - both, (q2[-1] * top * top + q2[i] * one).add_(q2[j] * two))
                        for top, one, two in ends
                    ]
                )
            for k in range(4):
                (first_x, first_2), (second_x, second_2) = halves[0][k >> 1], halves[1][k & 1]
                yield i, j, k, first_x + second_x, first_2 + second_2


def _minus(values: tuple[float, ...], a: int, b: int) -> float:
    return values[a] ** 2 - values[b] ** 2  # exact: multiples of 1/64


def _running(terms: Tensor) -> Tensor:
    """`[size + 1, n]`: sums of the first 0, 1, 2 … terms, one after another."""
    sums = [torch.zeros_like(terms[0])]
    for term in terms:
        sums.append(sums[-1] + term)
    return torch.stack(sums)


GRIDS = {
    "IQ1_S": OneBitGrid("IQ1_S", 1, SUPER_BLOCK),
    "IQ1_M": OneBitGrid("IQ1_M", 1, SUPER_BLOCK, 16, epsilon=1e-7, fudge=1.1125, unweighted=True),
}
