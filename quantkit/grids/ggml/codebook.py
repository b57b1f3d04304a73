"""Code books of the i-quants: the vectors of 8 or 4 magnitudes that a ggml block may contain (llama.cpp,
ggml/src/ggml-common.h), taken from the gguf package, and each vector's neighbours (iq2xs_init_impl).

A vector is represented by digits: the indices 0, 1, 2 … of its magnitudes in ascending order. The digits form
one number, the first digit being the lowest, by which the vector is found in the book.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from quantkit.grids.ggml.search import total

TAIL = 1 << 12  # distances below which the rest of the neighbours is looked at together
DISTANCES_AT_ONCE = 1 << 20  # distances that are looked at together


@dataclass(frozen=True, eq=False)
class CodeBook:
    """digits: int64 `[vector_size, vectors]`, each from 0 to base - 1. magnitudes: float `[base]`, of the
    digits. reach: a point's neighbours are the vectors at its `reach` smallest distances."""

    digits: Tensor
    magnitudes: Tensor
    reach: int

    @property
    def size(self) -> int:
        """Number of magnitudes in a vector."""
        return len(self.digits)

    @property
    def base(self) -> int:
        """Number of different magnitudes."""
        return len(self.magnitudes)

    def number(self, digits: Tensor) -> Tensor:
        """Return the numbers `[...]` of vectors given by digits `[vector_size, ...]`."""
        number = digits[-1].clone()
        for digit in reversed(digits[:-1].unbind()):
            number.mul_(self.base).add_(digit)
        return number

    @cached_property
    def found(self) -> Tensor:
        """Index in the book by a vector's number, int64 `[base ** vector_size]`; -1 if it is not there."""
        found = torch.full((self.base**self.size,), -1, device=self.digits.device)
        found[self.number(self.digits)] = torch.arange(self.digits.shape[1], device=found.device)
        return found

    @cached_property
    def neighbours(self) -> tuple[Tensor, Tensor, Tensor]:
        """start, count, ids, int64 `[points]`, `[points]`, `[all]`: neighbours `ids[start[p]:][:count[p]]` of
        point p, nearest first; of equally near ones, in the order of the book."""
        numbers = torch.arange(self.base**self.size)
        places = torch.stack([numbers // self.base**k % self.base for k in range(self.size)], 1).float()
        vectors = self.digits.cpu().float()
        length = vectors.square().sum(0)
        counts, ids = [], []
        for chunk in places.split(max(1, DISTANCES_AT_ONCE // vectors.shape[1])):
            distance = torch.addmm(length, chunk, vectors, alpha=-2).add_(chunk.square().sum(1, keepdim=True))
            reach = distance.amin(1, keepdim=True)
            for _ in range(self.reach - 1):  # the next larger one that occurs
                reach = distance.masked_fill(distance <= reach, torch.inf).amin(1, keepdim=True)
            near = distance <= reach
            row, place = near.nonzero(as_tuple=True)
            order = torch.argsort(row * (1 << 20) + distance[near].long(), stable=True)
            counts.append(near.sum(1))
            ids.append(place[order])
        count = torch.cat(counts)
        parts = count.cumsum(0) - count, count, torch.cat(ids)
        return tuple(part.to(self.digits.device) for part in parts)


@cache
def named(type_name: str, reach: int, device: torch.device) -> CodeBook:
    """Return the code book of a ggml type on a device; see CodeBook."""
    from gguf import quants

    kind = getattr(quants, type_name)
    kind.init_grid()
    values = torch.from_numpy(np.array(kind.grid)).view(kind.grid_shape).t().contiguous()
    magnitudes = torch.tensor(kind.grid_map, dtype=torch.float32)
    digits = torch.searchsorted(magnitudes, values)
    return CodeBook(digits.to(device), magnitudes.to(device), reach)


def nearest_neighbour(
    book: CodeBook, values: Tensor, points: Tensor, x: Tensor, weights: Tensor, scale: Tensor
) -> Tensor:
    """Return for each of `points [n]` (numbers of vectors) the index in the book, int64 `[n]`, of the
    neighbour with the least `Σ weights (scale value - x)²`; of equal ones the first. x: `[vector_size, n]`.

    values: `[vector_size, vectors]`, values of the book's vectors, in units of `scale [n]`. Points are sorted
    by their number of neighbours, so that at each rank the points that have one more come first.
    """
    starts, counts, ids = book.neighbours
    count, order = counts[points].sort(descending=True)
    start = starts[points[order]]
    x, weights, scale = x.index_select(1, order), weights.index_select(1, order), scale[order]
    most = int(count[0]) if len(count) else 0
    ranks = torch.arange(most, device=count.device)
    left = (len(count) - torch.searchsorted(count.flip(0), ranks, right=True)).tolist()
    best, place = scale.new_full(scale.shape, torch.inf), ids[start] if most else start
    for rank, n in enumerate(left):
        if n * (most - rank) <= TAIL:
            _compare_rest(ids, start[:n], count[:n], rank, best[:n], place[:n], x, weights, scale, values)
            break
        candidates = ids[start[:n] + rank]
        difference = values.index_select(1, candidates).mul_(scale[:n]).sub_(x[:, :n])
        cost = total(torch.mul(weights[:, :n], difference).mul_(difference))
        better = cost < best[:n]
        torch.where(better, cost, best[:n], out=best[:n])
        torch.where(better, candidates, place[:n], out=place[:n])
    return torch.empty_like(place).index_copy_(0, order, place)


def _compare_rest(
    ids: Tensor, start: Tensor, count: Tensor, rank: int, best: Tensor, place: Tensor,
    x: Tensor, weights: Tensor, scale: Tensor, values: Tensor,
) -> None:  # fmt: skip
    """Compare neighbours from `rank` on, for the few points that have more; change `best` and `place`."""
    n, ranks = len(start), torch.arange(rank, int(count[0]), device=start.device)
    there = ranks < count[:, None]
    ids = ids[torch.where(there, start[:, None] + ranks, start[:, None])]  # [points, ranks]
    difference = values[:, ids].mul_(scale[:n, None]).sub_(x[:, :n, None])
    cost = total((weights[:, :n, None] * difference).mul_(difference)).masked_fill_(~there, torch.inf)
    least = cost.amin(1, keepdim=True)
    first = (cost == least).to(torch.uint8).cumsum(1).eq(0).sum(1, keepdim=True).clamp_(max=len(ranks) - 1)
    better = least[:, 0] < best
    place.copy_(torch.where(better, ids.gather(1, first)[:, 0], place))
