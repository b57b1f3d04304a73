"""Speed-up by a draft model, from α, c and k: Leviathan, Kalman, Matias 2023, "Fast Inference from
Transformers via Speculative Decoding", arXiv:2211.17192, section 3.

    α   probability that a drafted token is accepted, equal and independent for all       (definition 3.1)
    c   time to draft a token over the time of one step of the target alone               (definition 3.7)
    k   tokens drafted for each pass of the target; the paper's γ

    tokens of a step = (1 − α^(k+1)) / (1 − α)                                               (equation 1)
    speed-up         = tokens of a step / (k c + 1)                                         (theorem 3.8)

The speed-up assumes that the target checks k + 1 tokens in the time of one. If checking takes v times as
long, the denominator is k c + v. If α > c, some k gains: k = 1 gains (1 + α) / (1 + c) (corollary 3.9).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.serving.specdec.settings import MOST


@dataclass(frozen=True)
class DraftStep:
    """One pass of the target. drafted: number of tokens to check. accepted: number that the target accepted.
    tokens: new tokens of the text, accepted + 1 unless the text ended earlier."""

    drafted: int
    accepted: int
    tokens: int

    @property
    def judged(self) -> int:
        """Number of drafted tokens that count for α: the accepted ones, and the rejected one if there is one.
        Tokens after a rejected one, or after the text's end, do not count."""
        return self.accepted + (self.accepted < self.drafted and self.tokens > self.accepted)


def acceptance(steps: Iterable[DraftStep]) -> tuple[float | None, int]:
    """Return the maximum likelihood estimate of α (None if nothing was drafted) and the number of tokens it
    is estimated from.

    A step accepts a < d of d drafted tokens with probability α^a (1 − α), and all with α^d: a geometric
    distribution cut at d. The likelihood is α^A (1 − α)^R with A accepted tokens and R steps that rejected
    one, so its maximum is A / (A + R) for any d.
    """
    steps = list(steps)
    judged = sum(step.judged for step in steps)
    return (sum(step.accepted for step in steps) / judged if judged else None), judged


def standard_error(rate: float, judged: int) -> float:
    """Return the standard error of an α estimated from `judged` tokens."""
    return (rate * (1 - rate) / judged) ** 0.5


def tokens_of_step(alpha: float, k: int) -> float:
    """Return the expected number of new tokens of a step (equation 1)."""
    return sum(alpha**j for j in range(k + 1))


def speedup(alpha: float, cost: float, k: int) -> float:
    """Return the expected speed-up of decoding (theorem 3.8)."""
    return tokens_of_step(alpha, k) / (k * cost + 1)


def best_k(alpha: float, cost: float) -> int:
    """Return the k with the largest expected speed-up; 0 (do not draft) if none is above 1."""
    return max(range(MOST + 1), key=lambda k: speedup(alpha, cost, k))
