"""The searches of search.py in a third of the steps, for the same formats: no worse by weighted squared error
than ggml's, but not the same to the bit.

Groups are brought to a common range first, where the codes of a candidate take two passes. Candidates are
chosen to complement each other: each list was grown greedily on normal, heavy-tailed and trained weights,
with and without importance, until it beat ggml's search on all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.grids.ggml.search import EPSILON, Plan, over
from quantkit.grids.ggml.search import total as total_in_order


class Range(NamedTuple):
    """The range of the group covers nmax + extra codes."""

    extra: float


class Spread(NamedTuple):
    """nmax codes cover the weighted mean and so many standard deviations on both sides of it."""

    deviations: float


class Move(NamedTuple):
    """The lowest and highest of the best codes so far are moved by this much."""

    low: float
    high: float


FEW_CODES = (
    Range(0.4), Move(-0.8, -0.4), Spread(1.5), Move(0.8, 0.0), Move(-0.2, -0.2), Move(0.2, 0.8), Range(-0.2),
    Range(1.0),
)  # fmt: skip
MANY_CODES = (
    Range(0.4), Range(-0.4), Range(-1.0), Spread(2.5), Move(-0.4, 0.2), Move(0.8, -0.8), Range(1.5),
    Move(0.12, -0.12),
)  # fmt: skip
SIGNED_RANGES = (0.2, -1.0, 1.4, -0.2)  # the largest weight gets code -(nmax + this)
SIGNED_MOVES = (-0.6, 0.1)
UNSIGNED_RANGES = (0.0, -1.0, -0.5, 0.5, 1.0)


def total(terms: Tensor) -> Tensor:
    """Sum over dimension 0; on an accelerator in whatever order takes one launch."""
    return total_in_order(terms) if terms.device.type == "cpu" else terms.sum(0)


def extreme(x: Tensor) -> Tensor:
    """The value of largest magnitude of each column; of equals the negative one, for which nobody waits."""
    high, low = x.amax(0), x.amin(0)
    return torch.where(high > -low, high, low)


def dot(*factors: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum over dimension 0 of the product of `[size, groups]`; on a CPU in one pass over memory."""
    if factors[0].device.type == "cpu":
        rule = "ij,ij->j" if len(factors) == 2 else "ij,ij,ij->j"
        arrays = [factor.numpy() for factor in factors]
        return torch.from_numpy(np.einsum(rule, *arrays, out=None if out is None else out.numpy()))
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return torch.sum(product, 0, out=out)


def make_qkx(
    x: Tensor, weights: Tensor, nmax: int, plan: Plan, codes: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As search.make_qkx, whose plan is not looked at.

    With u in 0 .. 1 for x, `Σ weights (u - scale code - offset)²` is least for the scale and offset of a
    weighted regression, and then smaller by its explained sum of squares, `a² / (d Σ weights)`.
    """
    minimum = x.amin(0).clamp_(max=0)
    span = x.amax(0).sub_(minimum)
    flat = span <= 0
    span.masked_fill_(flat, 1)
    u = torch.sub(x, minimum).mul_(over(1, span))
    weighted = weights * u
    search = _Regression(weights.sum(0), weighted.sum(0), dot(weighted, u), minimum / -span)
    code = torch.empty_like(x)
    sums = x.new_empty(3, x.shape[1])
    for step in FEW_CODES if nmax <= 3 else MANY_CODES:
        factor, shift = search.line(step, nmax)
        torch.mul(u, factor, out=code)
        if shift is not None:
            code.add_(shift)
        code.round_().clamp_(0, nmax)
        dot(weights, code, out=sums[0])
        dot(weights, code, code, out=sums[1])
        dot(weighted, code, out=sums[2])
        search.offer(sums)
    scale, offset = search.solution(nmax)
    low = offset.mul_(span).add_(minimum).clamp_(max=0).neg_()
    scale = scale.mul_(span).masked_fill_(flat, 0)
    if codes:
        torch.add(x, low, out=code).div_(scale.masked_fill(flat, 1)).round_().clamp_(0, nmax)
    return scale, low, code if codes else None


class _Regression:
    """The best of the codes offered, by their sums `[3, groups]`: Σ w l, Σ w l², Σ w u l.

    largest_offset: that keeps the offset of x at or below 0.
    """

    def __init__(self, sum_w: Tensor, sum_u: Tensor, sum_u2: Tensor, largest_offset: Tensor):
        self.sum_w, self.sum_u, self.sum_u2, self.largest_offset = sum_w, sum_u, sum_u2, largest_offset
        self.best = torch.full_like(sum_w, -1)
        self.sums = sum_w.new_zeros(3, len(sum_w))

    def offer(self, sums: Tensor) -> None:
        """Keep these if they are better."""
        a, d = self._moments(sums)
        explained = torch.where(d > 0, a.mul_(a).div_(d), -1)
        better = explained > self.best
        self.best = torch.maximum(explained, self.best)
        self.sums = torch.where(better, sums, self.sums)

    def line(self, step: Range | Spread | Move, nmax: int) -> tuple[float | Tensor, Tensor | None]:
        """Factor and shift that take u to the codes of a candidate."""
        if isinstance(step, Range):
            return nmax + step.extra, None
        if isinstance(step, Spread):
            mean = self.sum_u / self.sum_w
            reach = (self.sum_u2 / self.sum_w).sub_(mean * mean).clamp_(min=0).sqrt_().mul_(step.deviations)
            start = (mean - reach).clamp_(min=0)
            factor = over(nmax, (mean + reach).clamp_(max=1).sub_(start))
            return factor, -start * factor
        scale, offset = self.solution(nmax)
        factor = over(1 + (step.high - step.low) / nmax, scale)
        return factor, step.low - offset * factor

    def _moments(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        sum_l, sum_l2, sum_ul = sums
        return self.sum_w * sum_ul - self.sum_u * sum_l, self.sum_w * sum_l2 - sum_l * sum_l

    def solution(self, nmax: int) -> tuple[Tensor, Tensor]:
        """Scale and offset of the best; those of the whole range where no codes were any good."""
        sum_l, sum_l2, sum_ul = self.sums
        a, d = self._moments(self.sums)
        offset = (sum_l2 * self.sum_u - sum_l * sum_ul).div_(d)
        limit = self.largest_offset
        scale = torch.where(offset > limit, (sum_ul - limit * sum_l).div_(sum_l2), a.div_(d))
        useful = (self.best >= 0) & (scale > 0)
        return torch.where(useful, scale, 1 / nmax), torch.where(useful, torch.minimum(offset, limit), 0)


def make_qx(x: Tensor, weights: Tensor, nmax: int, codes: bool) -> tuple[Tensor, Tensor | None]:
    """As search.make_qx."""
    largest = extreme(x)
    zero = largest.abs() < EPSILON
    largest = largest.masked_fill_(zero, 1)
    u = x * over(-1, largest)
    weighted = weights * u
    code = torch.empty_like(x)
    best = torch.full_like(largest, -1)
    scale = torch.zeros_like(largest)

    def offer(best: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        code.round_().clamp_(-nmax, nmax - 1)
        sum_l2 = dot(weights, code, code)
        sum_ul = dot(weighted, code)
        refitted = sum_ul / sum_l2
        explained = torch.where(sum_l2 > 0, refitted * sum_ul, -1)
        better = explained > best
        return torch.maximum(explained, best), torch.where(better, refitted, scale)

    for extra in SIGNED_RANGES:
        torch.mul(u, nmax + extra, out=code)
        best, scale = offer(best, scale)
    for move in SIGNED_MOVES:
        torch.mul(u, over(1 + move / nmax, scale), out=code)
        best, scale = offer(best, scale)
    if codes:
        factor = torch.where(scale == 0, 0.0, over(1, scale))
        torch.mul(u, factor, out=code).round_().clamp_(-nmax, nmax - 1).add_(nmax)
    return scale.mul_(largest).neg_().masked_fill_(zero, 0), code if codes else None


def make_qp(x: Tensor, weights: Tensor, nmax: int) -> tuple[Tensor, Tensor]:
    """As search.make_qp, without its rounds."""
    largest = torch.where(weights > 0, x, 0.0).amax(0)  # what costs nothing may be cut off
    largest = torch.where(largest > 0, largest, x.amax(0))
    zero = largest < EPSILON
    u = x / largest.masked_fill(zero, 1)
    weighted = weights * u
    best = torch.full_like(largest, -1)
    scale = torch.full_like(largest, 1 / nmax)
    for extra in (*UNSIGNED_RANGES, None):
        code = (u / scale if extra is None else u * (nmax + extra)).round_().clamp_(0, nmax)
        sum_l2, sum_ul = dot(weights, code, code), dot(weighted, code)
        refitted = sum_ul / sum_l2
        explained = torch.where(sum_l2 > 0, refitted * sum_ul, -1)
        better = explained > best
        best, scale = torch.maximum(explained, best), torch.where(better, refitted, scale)
    code = (u / scale).round_().clamp_(0, nmax)
    return (scale * largest).masked_fill_(zero, 0), code.masked_fill_(zero, 0)
