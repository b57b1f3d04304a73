"""Computes the metrics of a model, with standard errors, from scores of single tokens.

Metrics are means over scored tokens, in nats, or functions of such means; the delta method gives the standard
errors of functions. Standard errors treat tokens as independent. Differences to the base are paired by token:
since both models predict the same tokens, the difference has a much smaller error than either perplexity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import one_of
from quantkit.models.machine import distributed

SELECTABLE = ("ppl", "dppl", "kld", "top1", "floor")  # ppl is always measured


@dataclass(frozen=True)
class Scores:
    """Scores of every scored token, in the order of the windows. nll: float32 `[tokens]`, in nats.

    kld: float32 `[tokens]`, KL divergence from the base's prediction, in nats. agree: bool `[tokens]`,
    whether both models rank the same token first. difference: float32 `[tokens]`, KL divergence of an
    engine's prediction from that of quantkit's decode, in nats. None if not measured.
    """

    nll: Tensor
    kld: Tensor | None = None
    agree: Tensor | None = None
    difference: Tensor | None = None

    def of_all_ranks(self) -> Scores:
        """Gather the scores of all ranks, in the order of the windows."""
        gathered = distributed.all_gather(self)
        names = [name for name, values in vars(self).items() if values is not None]
        return Scores(**{name: torch.cat([getattr(scores, name) for scores in gathered]) for name in names})


def select(names: str | None) -> frozenset[str]:
    """Parse a comma-separated list of metrics; None: all. Raises QuantkitError for an unknown name."""
    chosen = SELECTABLE if names is None else tuple(name.strip() for name in names.split(","))
    return frozenset(one_of(name, SELECTABLE, f"--metrics: no metric is called {name!r}") for name in chosen)


def summarize(scores: Scores, base: Scores | None, chosen: frozenset[str]) -> dict[str, Any]:
    """Return the metrics of one model as JSON: nll and ppl, and the chosen ones of dppl, kld and top1.

    base: scores of the same tokens; None for the base itself, whose dppl, kld and top1 are None.
    """
    nll = estimate(scores.nll)
    ppl = exp(nll["value"])
    metrics = {
        "nll": nll,
        "ppl": {"value": ppl, "stderr": ppl * nll["stderr"]},
        "dppl": increase(scores.nll, base.nll) if base else None,
        "kld": divergence(scores.kld) if scores.kld is not None else None,
        "top1": scores.agree.double().mean().item() if scores.agree is not None else None,
    }
    return {name: metrics[name] for name in metrics if name in chosen | {"nll", "ppl"}}


def estimate(values: Tensor) -> dict[str, float]:
    """Return mean and standard error of `values [tokens]`, in float64 (NaN for a single token)."""
    values = values.double()
    spread = values.std().item() if len(values) > 1 else math.nan
    return {"value": values.mean().item(), "stderr": spread / math.sqrt(len(values))}


def increase(nll: Tensor, base_nll: Tensor) -> dict[str, float]:
    """Return the increase of the perplexity of `nll [tokens]` over that of `base_nll [tokens]`, absolute and
    relative, with standard errors.

    By the delta method, `exp(mean a) - exp(mean b)` has the variance of the mean of
    `exp(mean a) a - exp(mean b) b`. The ratio's variance follows from the mean of `a - b`.
    """
    ours, theirs = nll.double(), base_nll.double()
    ppl, base_ppl = exp(ours.mean().item()), exp(theirs.mean().item())
    difference = estimate(ours - theirs)
    ratio = exp(difference["value"])
    return {
        "value": ppl - base_ppl,
        "stderr": estimate(ppl * ours - base_ppl * theirs)["stderr"],
        "relative": ratio - 1,
        "relative_stderr": ratio * difference["stderr"],
    }


def divergence(kld: Tensor) -> dict[str, float]:
    """Return mean, standard error, median, p99 and maximum of `kld [tokens]`, in nats."""
    mean = estimate(kld)
    values = kld.double().numpy()  # torch.quantile takes no more than 16 million values
    median, p99 = np.quantile(values, (0.5, 0.99)).tolist()
    ranked = {"median": median, "p99": p99, "max": values.max().item()}
    return {"mean": mean["value"], "stderr": mean["stderr"]} | ranked


def exp(value: float) -> float:
    """Return `math.exp(value)`, or infinity if it overflows, as for a broken model's perplexity."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
