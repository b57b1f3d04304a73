"""The vector of signs and magnitudes that is nearest in a given metric: what error feedback asks of a code book.

Rounding a vector q of eight weights costs `(y - q) M (y - q)ᵀ`, counted in steps, where M [8, 8] is what is left
of the Hessian for them. Magnitudes and signs are chosen in turn, each the best of all there are for the other:
a few thousand vectors are compared of the quarter of a million that a book and its signs make. No turn raises
the cost.

For `q = s g`, signs times magnitudes, it is `g (s M s) gᵀ - 2 (s h) gᵀ` with `h = M y`, but for a constant. The
first term is one for all rows with those signs: a table. The second is a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.grids.ggml.codebook import CodeBook
from quantkit.grids.parallel import elements_at_once

SIGNS = 8  # weights that are chosen together: those whose signs share a byte


@dataclass(frozen=True)
class _Tables:
    """What can be chosen. magnitudes: `[vectors, size]`; patterns: signs, `[patterns, 8]`."""

    magnitudes: Tensor
    patterns: Tensor


@cache
def _tables(book: CodeBook, unit: float, even: bool) -> _Tables:
    bits = torch.arange(2**SIGNS)[:, None] >> torch.arange(SIGNS) & 1
    bits = bits[bits.sum(1) % 2 == 0] if even else bits
    magnitudes = (book.magnitudes.cpu() * unit)[book.digits.cpu()].t().contiguous()
    device = book.digits.device
    return _Tables(magnitudes.to(device), (1 - 2 * bits).float().to(device))


class VectorSearch:
    """For one metric `M [8, 8]`: `nearest` of any targets."""

    def __init__(self, book: CodeBook, unit: float, even: bool, metric: Tensor):
        self.metric, self.even, self.size = metric, even, book.size
        self.tables = _tables(book, unit, even)
        magnitudes, patterns = self.tables.magnitudes, self.tables.patterns
        parts = [slice(k, k + book.size) for k in range(0, SIGNS, book.size)]
        self.parts = parts
        outer = (magnitudes[:, :, None] * magnitudes[:, None]).flatten(1)  # [vectors, size * size]
        signs = torch.arange(2**book.size, device=metric.device)[:, None] >> torch.arange(
            book.size, device=metric.device
        )
        signs = 1.0 - 2 * (signs & 1)
        both = signs[:, :, None] * signs[:, None]
        # by the signs of a part's weights, as bits, `[2 ** size, vectors]`
        self.squares = [((both * metric[p, p]).flatten(1)) @ outer.t() for p in parts]
        # what the first part costs while the second one may still take any value
        self.first = metric[parts[0], parts[0]]
        self.first_squares = self.squares[0]
        if len(parts) > 1:
            a, b = parts
            self.first = self.first - metric[a, b] @ torch.linalg.solve(metric[b, b], metric[b, a])
            self.first_squares = (both * self.first).flatten(1) @ outer.t()
        self.bits = 2 ** torch.arange(book.size, device=metric.device)

    def nearest(self, y: Tensor, start: Tensor | None = None, turns: int = 2) -> Tensor:
        """Levels `[8, n]` near `y [8, n]`; if `start` is given, they are no worse than that."""
        out = torch.empty_like(y)
        width = max(1, elements_at_once(y.device) // len(self.tables.magnitudes))
        for k in range(0, y.shape[1], width):
            part = slice(k, k + width)
            out[:, part] = self._nearest(y[:, part].t().contiguous(), turns).t()
        if start is not None:
            worse = self.cost(y - out) > self.cost(y - start)
            out = torch.where(worse, start, out)
        return out

    def cost(self, missed: Tensor) -> Tensor:
        """`e M eᵀ` of `missed [8, n]`."""
        return (self.metric @ missed).mul_(missed).sum(0)

    def _nearest(self, y: Tensor, turns: int) -> Tensor:
        pull = y @ self.metric  # h, [n, 8]
        signs = self._signs_of(y)
        q = torch.zeros_like(y)
        for k, part in enumerate(self.parts):
            if k == 0:
                h = y[:, part] @ self.first
                q[:, part] = self._magnitudes(h, signs[:, part], self.first_squares)
            else:
                h = pull[:, part] - q[:, self.parts[0]] @ self.metric[self.parts[0], part]
                q[:, part] = self._magnitudes(h, signs[:, part], self.squares[k])
        for _ in range(turns - 1):
            signs = self._signs(pull, q.abs())
            q = q.abs() * signs
            for k, part in enumerate(self.parts):
                h = pull[:, part]
                for other in self.parts[:k] + self.parts[k + 1 :]:
                    h = h - q[:, other] @ self.metric[other, part]
                q[:, part] = self._magnitudes(h, signs[:, part], self.squares[k])
        return q

    def _signs_of(self, y: Tensor) -> Tensor:
        """The signs of y; where they have to be even and are not, the cheapest is another."""
        signs = torch.where(y < 0, -1.0, 1.0)
        if self.even:
            cost = self.metric.diagonal() * y * y
            odd = signs.prod(1) < 0
            signs[odd.nonzero()[:, 0], cost.argmin(1)[odd]] *= -1
        return signs

    def _magnitudes(self, h: Tensor, signs: Tensor, squares: Tensor) -> Tensor:
        """The best magnitudes for these signs, with them `[n, size]`."""
        pattern = ((signs < 0) * self.bits).sum(1)
        cost = squares[pattern].addmm_(h * signs, self.tables.magnitudes.t(), alpha=-2)
        return self.tables.magnitudes[cost.argmin(1)] * signs

    def _signs(self, pull: Tensor, magnitudes: Tensor) -> Tensor:
        """The best signs for these magnitudes, `[n, 8]`."""
        patterns = self.tables.patterns
        both = (patterns[:, :, None] * patterns[:, None] * self.metric).flatten(1)
        outer = (magnitudes[:, :, None] * magnitudes[:, None]).flatten(1)
        cost = (outer @ both.t()).addmm_(pull * magnitudes, patterns.t(), alpha=-2)
        return patterns[cost.argmin(1)]
