"""Gain of a draft, from acceptance, cost and k: Leviathan et al. 2023 (arXiv:2211.17192), section 3.

    α   probability that a drafted token is accepted, each alike and independent          (definition 3.1)
    c   time to draft a token over the time of one step of the target alone               (definition 3.7)
    k   tokens drafted for each pass of the target; the paper's γ

    tokens of a step = (1 − α^(k+1)) / (1 − α)                                               (equation 1)
    speed-up         = tokens of a step / (k c + 1)                                         (theorem 3.8)

The last supposes that the target checks k + 1 tokens in the time of one. Where that takes v times as long,
k c + v stands for k c + 1. With α > c some k gains, at least (1 + α) / (1 + c) with k = 1 (corollary 3.9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.serving.specdec.settings import MOST


@dataclass(frozen=True)
class Step:
    """One pass of the target. drafted: tokens to check; accepted: number of them that the target took, from
    the first on; tokens: new tokens of the text, accepted + 1 unless the text ended before."""

    drafted: int
    accepted: int
    tokens: int

    @property
    def judged(self) -> int:
        """Drafted tokens that were checked: tokens after a refused one are not. None is refused where all
        were accepted, or the text ended first."""
        return self.accepted + (self.accepted < self.drafted and self.tokens > self.accepted)


def acceptance(steps: Iterable[Step]) -> tuple[float | None, int]:
    """Return α by maximum likelihood, None where nothing was drafted, and the number of tokens it is
    estimated from.

    A step accepts a < d of d drafted tokens with probability α^a (1 − α), and all with α^d: a geometric
    distribution cut at d. The likelihood is α^A (1 − α)^R with A tokens accepted and R steps that refused
    one, so its maximum is A / (A + R), whatever the d were.
    """
    steps = list(steps)
    judged = sum(step.judged for step in steps)
    return (sum(step.accepted for step in steps) / judged if judged else None), judged


def standard_error(rate: float, judged: int) -> float:
    """Return the standard error of an α estimated from `judged` tokens."""
    return (rate * (1 - rate) / judged) ** 0.5


def tokens_of_step(alpha: float, k: int) -> float:
    """Return the expected tokens of a step (equation 1); k + 1 for α = 1, 1 for α = 0."""
    return sum(alpha**j for j in range(k + 1))


def speedup(alpha: float, cost: float, k: int) -> float:
    """Return the expected speed-up of decoding (theorem 3.8)."""
    return tokens_of_step(alpha, k) / (k * cost + 1)


def best_k(alpha: float, cost: float) -> int:
    """Return the k of the largest expected speed-up; 0 (do not draft) where none is above 1."""
    return max(range(MOST + 1), key=lambda k: speedup(alpha, cost, k))
