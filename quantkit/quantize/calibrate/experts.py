"""Statistics of experts that see few tokens: how much of their layer's they borrow.

The second moments of an expert's `n` tokens are an estimate of `in_features²` numbers, and for small `n` a
bad one: error feedback then fits noise. With an inverse-Wishart prior of `d` pseudo-tokens around the second
moments of the layer, of all experts' tokens together, the posterior mean is

    H = (n H_expert + d H_layer) / (n + d),    d = in_features

(Haff 1980, "Empirical Bayes estimation of the multivariate normal covariance matrix"; Ledoit and Wolf 2004
shrink likewise, towards the identity). An expert that nobody reached has the layer's own.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from torch import Tensor

from quantkit.quantize.solvers import SiteStatistics

Choice = Literal["shrink", "routed", "all"]


def borrowed(tokens: int, in_features: int, choice: Choice) -> float:
    """The layer's share in an expert's statistics."""
    if choice == "all" or not tokens:
        return 1.0
    return in_features / (tokens + in_features) if choice == "shrink" else 0.0


def of_expert(own: SiteStatistics, layer: SiteStatistics, in_features: int, choice: Choice) -> SiteStatistics:
    """An expert's statistics, with the layer's mixed in; the peak is its own where it has tokens."""
    share = borrowed(own.tokens, in_features, choice)
    if not share:
        return own

    def mixed(name: str) -> Tensor | None:
        mine, theirs = getattr(own, name), getattr(layer, name)
        if mine is None or (name == "peak" and own.tokens):
            return mine
        return mine.mul_(1 - share).add_(theirs, alpha=share) if share < 1 else theirs.clone()

    found = [field.name for field in fields(own) if isinstance(getattr(own, field.name), Tensor)]
    names = [name for name in found if name != "inputs"]  # which are no means
    return replace(own, **{name: mixed(name) for name in names})
