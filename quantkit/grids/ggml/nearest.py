"""Search for the vector of signs and magnitudes that is nearest in a metric, for error feedback.

Eight weights y, in units of their scale's step, become q at the cost `(y - q) M (y - q)ᵀ`, with the metric M
that follows from the Hessian. Magnitudes and signs are chosen in turn, each the best possible for the other.
About a hundred vectors are compared, out of up to a quarter of a million combinations.

For `q = s g`, signs times magnitudes, the cost is `g (s M s) gᵀ - 2 (s h) gᵀ` with `h = M y`, up to a
constant. The first term is the same for all rows with these signs, so it is a table. The second is a matrix
product.
"""

from functools import cache

import torch
from torch import Tensor

from quantkit.grids.ggml.codebook import CodeBook
from quantkit.grids.parallel import rows_at_once

SIGNS = 8  # weights that are chosen together: those whose signs share a byte
TURNS = 2  # in which magnitudes are chosen


class VectorSearch:
    """Search in one metric `M [8, 8]`. unit: of the book's magnitudes. even: an even number of signs is
    negative.

    A book with vectors of four is searched twice. The first search takes into account how far the second half
    can compensate.
    """

    def __init__(self, book: CodeBook, unit: float, even: bool, metric: Tensor):
        self.metric, self.even = metric, even
        self.magnitudes, outer, self.both = _tables(book, unit)
        self.patterns, self.both_patterns = _patterns(even, metric.device)
        self.bits = 2 ** torch.arange(book.size, device=metric.device)
        self.parts = [slice(k, k + book.size) for k in range(0, SIGNS, book.size)]
        # by the signs of a part's weights, as bits, `[2 ** size, vectors]`
        self.squares = [self.both.flatten(1) * metric[p, p].flatten() @ outer for p in self.parts]
        self.alone, self.squares_alone = metric[self.parts[0], self.parts[0]], self.squares[0]
        if len(self.parts) > 1:
            a, b = self.parts
            self.alone = self.alone - metric[a, b] @ torch.linalg.solve(metric[b, b], metric[b, a])
            self.squares_alone = self.both.flatten(1) * self.alone.flatten() @ outer

    def nearest(self, y: Tensor, start: Tensor | None = None) -> Tensor:
        """Return levels `[8, n]` near `y [8, n]`, at least as near as `start` if given."""
        out = torch.empty_like(y)
        width = rows_at_once(y.device, max(len(self.magnitudes), len(self.patterns)))
        for low in range(0, y.shape[1], width):
            part = slice(low, low + width)
            out[:, part] = self._nearest(y[:, part].t().contiguous()).t()
        if start is None:
            return out
        return torch.where(self.cost(y - out) < self.cost(y - start), out, start)

    def cost(self, missed: Tensor) -> Tensor:
        """Return `e M eᵀ` for each column e of `missed [8, n]`."""
        return (self.metric @ missed).mul_(missed).sum(0)

    def _nearest(self, y: Tensor) -> Tensor:
        """Return the nearest levels `[n, 8]` for `y [n, 8]`."""
        pull = y @ self.metric
        signs = self._signs_of(y)
        q = torch.zeros_like(y)
        first = self.parts[0]
        q[:, first] = self._magnitudes(y[:, first] @ self.alone, signs[:, first], self.squares_alone)
        for k in range(1, len(self.parts)):
            self._choose(k, q, pull, signs)
        for _ in range(TURNS - 1):
            signs = self._signs(pull, q.abs_())
            q *= signs
            for k in range(len(self.parts)):
                self._choose(k, q, pull, signs)
        return q

    def _choose(self, k: int, q: Tensor, pull: Tensor, signs: Tensor) -> None:
        """Write the best magnitudes of part k into q, given the signs and the other part of q."""
        part = self.parts[k]
        h = pull[:, part]
        for other in self.parts[:k] + self.parts[k + 1 :]:
            h = h - q[:, other] @ self.metric[other, part]
        q[:, part] = self._magnitudes(h, signs[:, part], self.squares[k])

    def _magnitudes(self, h: Tensor, signs: Tensor, squares: Tensor) -> Tensor:
        """Return the best magnitudes for these signs, multiplied by the signs, `[n, size]`."""
        pattern = ((signs < 0) * self.bits).sum(1)
        cost = squares.index_select(0, pattern).addmm_(h * signs, self.magnitudes.t(), alpha=-2)
        return self.magnitudes.index_select(0, least(cost)).mul_(signs)

    def _signs(self, pull: Tensor, magnitudes: Tensor) -> Tensor:
        """Return the best signs for these magnitudes, `[n, 8]`."""
        outer = (magnitudes[:, :, None] * magnitudes[:, None]).flatten(1)
        cost = outer @ (self.both_patterns * self.metric.flatten()).t()
        cost.addmm_(pull * magnitudes, self.patterns.t(), alpha=-2)
        return self.patterns.index_select(0, least(cost))

    def _signs_of(self, y: Tensor) -> Tensor:
        """Return the signs of y; if an even number must be negative and is not, the cheapest is flipped."""
        signs = torch.where(y < 0, -1.0, 1.0)
        if self.even:
            cheapest = least(self.metric.diagonal() * y * y)[:, None]
            odd = signs.prod(1, keepdim=True) < 0
            found = signs.gather(1, cheapest)
            signs.scatter_(1, cheapest, torch.where(odd, -found, found))
        return signs


def least(cost: Tensor) -> Tensor:
    """Return where each row of `cost [n, m]` is least, int64 `[n]`; numpy is 20 times as fast on a CPU."""
    if cost.device.type == "cpu":
        return torch.from_numpy(cost.numpy().argmin(1))
    return cost.argmin(1)


@cache
def _tables(book: CodeBook, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return magnitudes `[vectors, size]`, their products with each other `[size * size, vectors]`, and the
    products of signs `[2 ** size, size, size]`."""
    magnitudes = (book.magnitudes * unit)[book.digits].t().contiguous()
    outer = (magnitudes[:, :, None] * magnitudes[:, None]).flatten(1).t().contiguous()
    signs = _all_signs(book.size, magnitudes.device)
    return magnitudes, outer, signs[:, :, None] * signs[:, None]


@cache
def _patterns(even: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the signs of eight weights, `[patterns, 8]`, and their products, `[patterns, 64]`."""
    signs = _all_signs(SIGNS, device)
    signs = signs[signs.prod(1) > 0] if even else signs
    return signs, (signs[:, :, None] * signs[:, None]).flatten(1)


def _all_signs(size: int, device: torch.device) -> Tensor:
    bits = torch.arange(2**size, device=device)[:, None] >> torch.arange(size, device=device) & 1
    return 1.0 - 2 * bits
