"""What a draft gains, from acceptance, cost and k: Leviathan et al. 2023 (arXiv:2211.17192), section 3.

    α   probability that a drafted token is accepted, each alike and independent          (definition 3.1)
    c   time to draft a token over the time of one step of the target alone               (definition 3.7)
    k   tokens drafted for each pass of the target; the paper's γ

    tokens of a step = (1 − α^(k+1)) / (1 − α)                                               (equation 1)
    speed-up         = tokens of a step / (k c + 1)                                         (theorem 3.8)

The last supposes that the target checks k + 1 tokens in the time of one. Where that takes v times as long,
k c + v stands for k c + 1. With α > c some k gains, at least (1 + α) / (1 + c) with k = 1 (corollary 3.9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST = 64  # tokens drafted at once, that a best k is looked for up to


@dataclass(frozen=True)
class Step:
    """One pass of the target. drafted: tokens it was given to check; accepted: how many it took, from the
    first on; tokens: how many the text grew by, which is accepted + 1 unless the text ended before."""

    drafted: int
    accepted: int
    tokens: int

    @property
    def rejected(self) -> bool:
        """Whether a drafted token was refused: not where all were taken, nor where the text ended first."""
        return self.accepted < self.drafted and self.tokens > self.accepted

    @property
    def judged(self) -> int:
        """Drafted tokens that were looked at: what comes after a refused one never is."""
        return self.accepted + self.rejected


@dataclass(frozen=True)
class Acceptance:
    """rate: α; error: its standard error. judged: the drafted tokens it is estimated from."""

    rate: float
    error: float
    judged: int


def acceptance(steps: Iterable[Step]) -> Acceptance | None:
    """α by maximum likelihood; None where nothing was drafted.

    A step accepts a < d of d drafted tokens with probability α^a (1 − α), and all with α^d: a geometric
    distribution cut at d. The likelihood is α^A (1 − α)^R with A tokens accepted and R steps that refused
    one, so its maximum is A / (A + R), whatever the d were.
    """
    steps = list(steps)
    accepted, judged = sum(s.accepted for s in steps), sum(s.judged for s in steps)
    if not judged:
        return None
    rate = accepted / judged
    return Acceptance(rate, math.sqrt(rate * (1 - rate) / judged), judged)


def acceptance_of_mean(tokens_per_step: float, k: int) -> float:
    """α for which equation 1 gives that mean, where only totals are known; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if tokens_of_step(middle, k) < tokens_per_step:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def tokens_of_step(alpha: float, k: int) -> float:
    """Tokens that a step is expected to yield (equation 1); k + 1 for α = 1, 1 for α = 0."""
    return sum(alpha**j for j in range(k + 1))


def speedup(alpha: float, cost: float, k: int, check: float = 1.0) -> float:
    """Expected speed-up of decoding (theorem 3.8). check: v, what checking k + 1 tokens takes in steps of the
    target alone."""
    return tokens_of_step(alpha, k) / (k * cost + check)


def best_k(alpha: float, cost: float, most: int = MOST) -> int:
    """k of the largest expected speed-up; 0, do not draft, where none is above 1."""
    return max(range(most + 1), key=lambda k: speedup(alpha, cost, k))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of least squares through (x, y) with two different x at least."""
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
    return y0 - slope * x0, slope


def histogram(steps: Iterable[Step], k: int) -> list[int]:
    """Steps in which 0, 1, … k drafted tokens were accepted, of those that had any to check."""
    counts = [0] * (k + 1)
    for step in steps:
        counts[step.accepted] += step.drafted > 0
    return counts
