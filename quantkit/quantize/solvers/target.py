"""The target of a linear in a model that is quantized before it: what the original model would have given.

A linear behind quantized ones sees inputs X that are not the original model's X̃, and may add its output to
hidden states that lack R of the original's. Error feedback on `|X (W - Ŵ)ᵀ|²` takes that for granted. What
is wanted is the least of `|X Ŵᵀ - (X̃ Wᵀ + R)|²`, which is, but for a constant, `|X (W* - Ŵ)ᵀ|²` with

    W* = W + (W (X̃ - X)ᵀX + RᵀX) (XᵀX)⁻¹

the least-squares answer: so error feedback, refinement and round to nearest go on as before, from W*. (GPTAQ,
Li et al. 2025, arXiv:2504.02692, has X̃ as the target, too, and moves W column by column by an approximation
of this. R, by which a linear that writes to the residual stream makes up for what others have lost, is not
there.) XᵀX is damped as error feedback damps it, which holds W* back towards W.

A regression fits noise, too: the more, the wider the linear and the shorter the text. How much is known from
two halves of the text: what both say is real, what they say apart is not. The move is made as large as the
share that is real, the best linear shrinkage (Wiener's).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.quantize.solvers import SiteStatistics

TINY = torch.finfo(torch.float32).tiny


def moved(weights: Sequence[Tensor], statistics: SiteStatistics, factor: Tensor) -> list[Tensor]:
    """W* of each of a site's linears, `[out_k, in]`. factor: A, upper triangular, `A Aᵀ` the damped H."""
    found = []
    for weight in weights:
        halves = weight @ statistics.drift  # [2, out, in]
        if statistics.missing is not None:
            halves += statistics.missing
        # Δ H Δᵀ of a move Δ is the square of these, [2, in, out]
        halves = torch.linalg.solve_triangular(factor, halves.mT, upper=True)
        move = halves.sum(0)
        real = 4 * (halves[0] * halves[1]).sum() / move.square().sum().clamp(min=TINY)
        move = torch.linalg.solve_triangular(factor.t(), move, upper=False).t()
        found.append(torch.addcmul(weight, move, real.clamp(0, 1)))
    return found
