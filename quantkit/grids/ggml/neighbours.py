"""The vector of a code book that is nearest to a point beside it, among the point's neighbours, as ggml finds
it (iq2_find_best_neighbour and its like)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.grids.ggml.codebook import CodeBook
from quantkit.grids.ggml.search import total

TAIL = 1 << 12  # distances below which the rest of the neighbours is looked at together


def nearest_neighbour(
    book: CodeBook, values: Tensor, points: Tensor, x: Tensor, weights: Tensor, scale: Tensor
) -> Tensor:
    """Places in the book, int64 `[n]`, of those neighbours of `points [n]`, their numbers, that are nearest
    to `x [vector_size, n]`: `Σ weights (scale value - x)²` is least, and of equals the first counts.

    values: `[vector_size, vectors]`, what the book's vectors stand for, in units of `scale [n]`. Points go in
    order of how many neighbours they have, so that at each rank those that have one more stand first.
    """
    around = book.neighbours()
    count, order = around.count[points].sort(descending=True)
    start = around.start[points[order]]
    x, weights, scale = x.index_select(1, order), weights.index_select(1, order), scale[order]
    most = int(count[0]) if len(count) else 0
    ranks = torch.arange(most, device=count.device)
    left = (len(count) - torch.searchsorted(count.flip(0), ranks, right=True)).tolist()
    best, place = scale.new_full(scale.shape, torch.inf), around.ids[start] if most else start
    for rank, n in enumerate(left):
        if n * (most - rank) <= TAIL:
            _compare_rest(
                around.ids, start[:n], count[:n], rank, best[:n], place[:n], x, weights, scale, values
            )
            break
        ids = around.ids[start[:n] + rank]
        difference = values.index_select(1, ids).mul_(scale[:n]).sub_(x[:, :n])
        cost = total(torch.mul(weights[:, :n], difference).mul_(difference))
        better = cost < best[:n]
        torch.where(better, cost, best[:n], out=best[:n])
        torch.where(better, ids, place[:n], out=place[:n])
    return torch.empty_like(place).index_copy_(0, order, place)


def _compare_rest(
    ids: Tensor, start: Tensor, count: Tensor, rank: int, best: Tensor, place: Tensor,
    x: Tensor, weights: Tensor, scale: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """Neighbours from `rank` on of the few points that have so many; `best` and `place` change in place."""
    n, ranks = len(start), torch.arange(rank, int(count[0]), device=start.device)
    there = ranks < count[:, None]
    ids = ids[torch.where(there, start[:, None] + ranks, start[:, None])]  # [points, ranks]
    difference = values[:, ids].mul_(scale[:n, None]).sub_(x[:, :n, None])
    cost = total((weights[:, :n, None] * difference).mul_(difference)).masked_fill_(~there, torch.inf)
    least = cost.amin(1, keepdim=True)
    first = (cost == least).to(torch.uint8).cumsum(1).eq(0).sum(1, keepdim=True).clamp_(max=len(ranks) - 1)
    better = least[:, 0] < best
    place.copy_(torch.where(better, ids.gather(1, first)[:, 0], place))
