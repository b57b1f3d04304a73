"""Statistics of the inputs of one site, and the weights that a solver rounds by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import require
from quantkit.grids.grid import is_finite
from quantkit.layouts import Statistic
from quantkit.models.machine.device import tf32_products
from quantkit.quantize.solvers import measured
from quantkit.quantize.solvers.hessian import Indefinite, factorize

TINY = torch.finfo(torch.float32).tiny
Choice = Literal["shrink", "routed", "all"]  # the tokens that an expert's statistics come from


@dataclass(frozen=True)
class Drift:
    """The distance of a site's outputs from the original model's, of the tokens that both models ran.

    tokens: their number. hessian: H of them; the site's own tensor if they are all tokens. halves: one part
    for each half of the tokens, to be added up. With X̃ the original model's inputs, a part is
    `2 (X̃ - X)ᵀX / tokens`, `[in, in]`; or if `outputs`, where a linear has the site alone,
    `2 ((X̃ - X)Wᵀ + R)ᵀX / tokens`, `[out, in]`, with R the original minus the quantized model's hidden
    states to which that linear adds its output. In that last case each token is first divided by the root
    mean square of its hidden state, in `hessian` as well.
    """

    hessian: Tensor
    halves: Tensor
    outputs: bool
    tokens: int


class SiteStatistics(dict[Statistic, Any]):
    """The statistics of one site that a job needs, and no others. tokens: number of rows of the inputs X.
    has_prior: pseudo-tokens were added (`mixed`, `shrink`).

    Values are float32: HESSIAN `[in, in]`, INPUTS `[few, in]`, FOURTH `[2, in]`, DRIFT `Drift`, else `[in]`.
    """

    def __init__(
        self, values: Mapping[Statistic, Any] | None = None, tokens: int = 0, has_prior: bool = False
    ):
        super().__init__(values or {})
        self.tokens, self.has_prior = tokens, has_prior

    @property
    def hessian(self) -> Tensor:
        """Return `H = 2 XᵀX / tokens`, `[in, in]`."""
        return self[Statistic.HESSIAN]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        for value in self.values():
            yield from (value.hessian, value.halves) if isinstance(value, Drift) else (value,)

    def divided(self, scale: Tensor) -> SiteStatistics:
        """Return what a solver needs for inputs divided by `scale [in]`; changes Hessians in place."""
        hessian = _divide(self.hessian, scale)
        divided = SiteStatistics({Statistic.HESSIAN: hessian}, self.tokens, self.has_prior)
        if Statistic.PEAK in self:
            divided[Statistic.PEAK] = self[Statistic.PEAK] / scale
        if drift := self.get(Statistic.DRIFT):
            if drift.hessian is not self.hessian:
                _divide(drift.hessian, scale)
            drift.halves.div_(scale) if drift.outputs else _divide(drift.halves, scale)
            divided[Statistic.DRIFT] = drift
        return divided

    def mixed(self, layer: SiteStatistics, choice: Choice) -> SiteStatistics:
        """Return an expert's statistics, mixed with those of all experts of its layer. Tensors are changed in
        place. The peak is the expert's own if it has tokens; INPUTS are samples, which have no mean.

        The second moments of an expert's `n` tokens are an estimate of `in_features²` numbers. For small `n`
        the estimate is bad and error feedback fits noise. With an inverse-Wishart prior of `d` pseudo-tokens
        around the layer's second moments (those of all experts' tokens together), the posterior mean is

            H = (n H_expert + d H_layer) / (n + d),    d = in_features

        (Haff 1980, "Empirical Bayes estimation of the multivariate normal covariance matrix"; Ledoit and Wolf
        2004 shrink likewise, towards the identity). An expert without tokens has the layer's statistics.
        """
        mixed = SiteStatistics(self, self.tokens, has_prior=True)
        for statistic, values in self.items():
            share = borrowed(self.tokens, values.shape[-1], choice)
            if not share or statistic is Statistic.INPUTS or (statistic is Statistic.PEAK and self.tokens):
                continue
            shared = layer[statistic]
            if share < 1:
                mixed[statistic] = values.mul_(1 - share).add_(shared, alpha=share)
            else:
                mixed[statistic] = shared.clone()
        return mixed

    def shrink(self) -> None:
        """Add the prior of a site that is no expert's, in place: `in_features` pseudo-tokens without drift
        whose channels are uncorrelated. Products of different channels, and of inputs and drift, are then
        means over n + d instead of n tokens.

        Without it, error feedback fits the noise of few tokens (docs/gptq.md has figures). The
        inverse-Wishart prior is that of `mixed`, with the diagonal of H in place of the layer's moments.
        """
        if not self.has_prior:
            self.has_prior, drift = True, self.get(Statistic.DRIFT)
            _shrink(self.hessian, self.tokens)
            if drift:
                drift.halves.mul_(drift.tokens / (drift.tokens + len(self.hessian)))
                if drift.hessian is not self.hessian:
                    _shrink(drift.hessian, drift.tokens)

    def refuse_not_finite(self, linear: str, dtype: str) -> None:
        """Raise QuantkitError naming `linear` if its inputs overflowed in `dtype`."""
        what = f"activations entering {linear} are not finite in {dtype}"
        hint = "try --dtype float32; if that fails too, the checkpoint itself overflows"
        require(all(map(is_finite, self.tensors())), what, hint)


def _shrink(moments: Tensor, tokens: int) -> None:
    diagonal = moments.diagonal().clone()
    moments.mul_(tokens / (tokens + len(moments)))
    moments.diagonal().copy_(diagonal)


def _divide(moments: Tensor, scale: Tensor) -> Tensor:
    return moments.div_(scale).div_(scale[:, None])


def borrowed(tokens: int, in_features: int, choice: Choice) -> float:
    """Return the weight of the layer's statistics in an expert's, between 0 and 1."""
    if choice == "all" or not tokens:
        return 1.0
    return in_features / (tokens + in_features) if choice == "shrink" else 0.0


def retarget(weights: Sequence[Tensor], drift: Drift, damp: float) -> Sequence[Tensor]:
    """Return the weights `[out, in]` to be rounded in place of `weights`, so that the linears also compensate
    for the errors of earlier linears (`--target original`).

    A linear's inputs are X instead of the original model's X̃, and it may add its output to hidden states that
    differ by R from the original model's. `|X Ŵᵀ - (X̃ Wᵀ + R)|²` is, up to a constant, `|X (W* - Ŵ)ᵀ|²` with
    the least-squares solution

        W* = W + (W (X̃ - X)ᵀX + RᵀX) (XᵀX)⁻¹

    Later norms divide each hidden state by its root mean square, so tokens are weighted by the inverse of it
    where there is an R. Otherwise massive tokens, two hundred times as large as others, decide W* alone.

    (GPTAQ, Li et al. 2025, arXiv:2504.02692, approximates this move column by column, without R.) XᵀX is
    damped as for error feedback. A regression fits noise, the more the wider the linear and the shorter the
    text. The move is shrunk to the share on which two halves of the text agree, in an even sample of the rows
    (Wiener's linear shrinkage). Without a factorization of the Hessian, nothing moves.

    Hand the drift over: `retarget(weights, statistics.pop(DRIFT), damp)`. Its Hessian, as large as the
    factor, is freed before the moves are computed.
    """
    order = torch.arange(weights[0].shape[1], device=weights[0].device)
    halves, outputs = drift.halves, drift.outputs
    try:
        factor, *_ = factorize(drift.hessian, damp, order)
    except Indefinite:
        return weights
    del drift
    moved = []
    with tf32_products(factor.device):  # an error of a thousandth is far below the noise of the halves
        move = torch.linalg.solve_triangular(factor, halves.sum(0).mT, upper=True)
        move = torch.linalg.solve_triangular(factor.t(), move, upper=False).t()
        for weight in weights:
            sample = measured(len(weight))
            parts = halves[:, sample] if outputs else weight[sample] @ halves
            # Δ H Δᵀ of a move Δ is the square of these, [in, rows]; both at once would copy the factor twice
            first, second = (torch.linalg.solve_triangular(factor, part.mT, upper=True) for part in parts)
            whole = torch.add(first, second).square_().sum()
            share = 4 * first.mul_(second).sum() / whole.clamp(min=TINY)
            moved.append(torch.addcmul(weight, move if outputs else weight @ move, share.clamp(0, 1)))
    return moved
