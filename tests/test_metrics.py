"""metrics against literal recomputations: the jackknife of standard errors, numpy for quantiles."""

import math

import numpy as np
import pytest
import torch

from quantkit.errors import USAGE, QuantkitError
from quantkit.evaluation import metrics
from quantkit.evaluation.metrics import Scores


@pytest.fixture
def losses():
    """nll of a base and of a candidate that follows it closely, [400] each."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(400, generator=generator) * 6
    return base, base + 0.1 + 0.3 * torch.randn(400, generator=generator)


def jackknife(statistic, *samples: torch.Tensor) -> float:
    """Standard error of a statistic from leaving one token out at a time: no formula of its own."""
    count = len(samples[0])
    keep = ~torch.eye(count, dtype=torch.bool)
    values = np.array([statistic(*(sample.double()[row] for sample in samples)) for row in keep])
    return math.sqrt((count - 1) * values.var())


def ppl(nll: torch.Tensor) -> float:
    return math.exp(nll.mean().item())


def test_standard_errors_are_the_jackknife(losses):
    base, other = losses
    found = metrics.summarize(Scores(other), Scores(base), frozenset({"dppl"}))
    assert found["nll"]["stderr"] == pytest.approx(jackknife(lambda a: a.mean().item(), other), rel=1e-6)
    assert found["ppl"]["stderr"] == pytest.approx(jackknife(ppl, other), rel=0.01)
    pairs = [jackknife(f, other, base) for f in (lambda a, b: ppl(a) - ppl(b), lambda a, b: ppl(a) / ppl(b))]
    assert found["dppl"]["stderr"] == pytest.approx(pairs[0], rel=0.01)
    assert found["dppl"]["relative_stderr"] == pytest.approx(pairs[1], rel=0.01)
    assert found["dppl"]["value"] == pytest.approx(ppl(other.double()) - ppl(base.double()))
    assert found["dppl"]["relative"] == pytest.approx(ppl(other.double()) / ppl(base.double()) - 1)
    assert found["dppl"]["stderr"] < found["ppl"]["stderr"] / 3  # what pairing is for


def test_the_distribution_of_divergences():
    kld = torch.rand(1000, generator=torch.Generator().manual_seed(1)) ** 4
    found = metrics.divergence(kld)
    assert found["mean"] == pytest.approx(kld.double().mean().item())
    assert found["stderr"] == pytest.approx(kld.double().std().item() / math.sqrt(1000))
    ranked = sorted(kld.tolist())
    assert found["median"] == pytest.approx((ranked[499] + ranked[500]) / 2)
    assert found["p99"] == pytest.approx(
        ranked[989] + 0.01 * (ranked[990] - ranked[989])
    )  # 0.99 * 999 = 989.01
    assert found["max"] == ranked[-1]


def test_a_broken_models_numbers_are_infinite_not_an_error():
    base = torch.tensor([1.0, 2.0])
    found = metrics.summarize(Scores(base + 5000), Scores(base), frozenset({"dppl"}))
    assert found["ppl"]["value"] == found["dppl"]["value"] == found["dppl"]["relative"] == math.inf


def test_metrics_are_selected_by_name():
    assert metrics.select(None) == {"ppl", "dppl", "kld", "top1", "floor"}
    assert metrics.select("kld, top1") == {"kld", "top1"}
    with pytest.raises(QuantkitError) as error:
        metrics.select("kld,ppp,")
    assert error.value.exit_code == USAGE
    assert (
        "'ppp'" in error.value.message
        and "did you mean ppl?" in error.value.hint
        and "dppl" in error.value.hint
    )
