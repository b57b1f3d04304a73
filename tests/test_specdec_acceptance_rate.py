"""Leviathan et al. 2023: their own figures, and estimates against literal likelihoods."""

import math
import random

import pytest

from quantkit.serving.specdec import acceptance_rate
from quantkit.serving.specdec.acceptance_rate import DraftStep
from quantkit.serving.specdec.settings import MOST


@pytest.mark.parametrize(
    ("alpha", "k", "speedup"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_table_1_of_the_paper(alpha, k, speedup):
    """Where drafting costs nothing the speed-up is the tokens of a step."""
    assert round(acceptance_rate.speedup(alpha, 0, k), 2) == speedup
    assert acceptance_rate.tokens_of_step(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_tokens_of_a_step_where_the_formula_divides_by_zero():
    assert acceptance_rate.tokens_of_step(1.0, 4) == 5
    assert acceptance_rate.tokens_of_step(0.0, 4) == 1


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("cost", [0.0, 0.02, 0.2, 0.6, 1.2])
def test_best_k_is_that_of_a_search(alpha, cost):
    gains = [(1 - alpha ** (k + 1)) / (1 - alpha) / (k * cost + 1) for k in range(MOST + 1)]
    k = acceptance_rate.best_k(alpha, cost)
    assert gains[k] == pytest.approx(max(gains))
    assert (k > 0) == (alpha > cost)  # corollary 3.9
    if alpha > cost:
        assert gains[k] >= (1 + alpha) / (1 + cost) - 1e-12


def drawn(alpha: float, k: int, steps: int, seed: int) -> list[DraftStep]:
    """What independent draws make of steps; in one of ten the text may end, wherever it is then."""
    source, found = random.Random(seed), []
    for number in range(steps):
        accepted = next((j for j in range(k) if source.random() >= alpha), k)
        left = source.randint(1, k) if number % 10 == 9 else k + 1
        found.append(DraftStep(k, left, left) if accepted >= left else DraftStep(k, accepted, accepted + 1))
    return found


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.6, 4), (0.9, 8)])
def test_alpha_is_where_the_likelihood_is_largest(alpha, k):
    steps = drawn(alpha, k, 1500, seed=k)

    def log_likelihood(a: float) -> float:
        """α^a, and (1 − α) where one was looked at and refused."""
        refused = [s.tokens > s.accepted and s.accepted < k for s in steps]
        return sum(
            s.accepted * math.log(a) + r * math.log(1 - a) for s, r in zip(steps, refused, strict=True)
        )

    grid = [number / 200 for number in range(1, 200)]
    rate, judged = acceptance_rate.acceptance(steps)
    error = acceptance_rate.standard_error(rate, judged)
    assert abs(rate - max(grid, key=log_likelihood)) <= 1 / 200
    assert abs(rate - alpha) < 4 * error
    assert error == pytest.approx(math.sqrt(rate * (1 - rate) / judged))
    assert judged == sum(s.accepted + (s.tokens > s.accepted and s.accepted < k) for s in steps)


def test_nothing_drafted_has_no_alpha():
    assert acceptance_rate.acceptance([DraftStep(0, 0, 1)] * 3) == (None, 0)


def test_a_text_that_ends_refuses_nothing():
    """Two accepted and the end of the text, against two accepted and the third refused."""
    assert [DraftStep(4, 2, 2).judged, DraftStep(4, 2, 3).judged, DraftStep(4, 4, 5).judged] == [2, 3, 4]
