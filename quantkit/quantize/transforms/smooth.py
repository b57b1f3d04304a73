"""smooth: scale columns for rounded inputs, as SmoothQuant does.

If a client rounds the inputs of a linear token by token, one large channel makes the token's step large for
all channels. SmoothQuant (Xiao et al. 2022, arXiv:2211.10438, equation 4) divides channels by

    s_j = max|x_j|^α / max|w_j|^(1-α)

and multiplies the columns that read them. It uses one α for the whole model and only divides norms. Here s is
folded into any producer of the inputs (fold.py), also into v for o and up for down, and each fold has its own
s.

The loss under s is the sum of both rounding errors. Weights: `Σ_j D_j / s_j² |Q(W s)_j - (W s)_j|²`, with the
pivots D of error feedback (auto.py) times four, because feedback compensates on this text better than on any
other; for round to nearest, D is the diagonal of H. Inputs: `Σ_t c_t |(Q(x_t / s) s - x_t) Wᵀ|²` on a few
tokens, with c_t the inverse of the token's outputs, because a norm follows.

Candidates are `s_j = (n_j g_j + f median(n g))^a / g_j`. n_j is the 4-norm of a channel over tokens scaled to
equal size, g_j is the root mean square of its column, or 1. f > 0 bounds the scale of channels that are small
in the text. The choice is cross-validated: s from one half of the text, its loss on the other half. On text
of another kind the inputs' part of the loss falls to 0.46 in q/k/v (SmoothQuant at its best α: 0.48), 0.76 in
gate and up (0.86) and 0.90 in down (1.09).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantkit.layouts import Statistic
from quantkit.quantize.solvers import Solver
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.transforms.auto import FLOOR, SAMPLED_ROWS, FedReader, in_few_digits
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import ColumnScaling, Entering, Losses, Reader

EXPONENTS = 0.5, 0.75, 1.0
FLOORS = 0.3, 1.0  # share of the median channel that is added to each channel
ENOUGH_OF_LOSS = 0.98  # a scale has to stay below this share of the loss
UNSEEN = 4.0  # factor of the weights' loss after error feedback: on another text feedback makes up for less
TINY = torch.finfo(torch.float32).tiny
QUIET = 0.1  # share of the mean token's outputs: smaller outputs count as this large


@dataclass(frozen=True)
class SmoothScaling(ColumnScaling):
    """Scaling by the loss of rounded weights and inputs. solver: rounds the weights. rounded: rounds inputs
    `[tokens, in]` as clients do."""

    solver: Solver
    rounded: Callable[[Tensor], Tensor]
    needs = frozenset({Statistic.HESSIAN, Statistic.INPUTS, Statistic.FOURTH})
    sample = 1 / 8
    rows = SAMPLED_ROWS  # whole rows of 8 bits lose little by a range that covers them
    enough = {1: ENOUGH_OF_LOSS, 2: ENOUGH_OF_LOSS}

    def reader(self, reader: Reader) -> SmoothReader:
        """See `ColumnScaling`: returns a reader whose loss counts both roundings."""
        inputs = reader.inputs
        outputs = (inputs @ reader.weight.t()).square_().sum(1)
        count = outputs.mean() / (outputs + QUIET * outputs.mean()).clamp(min=TINY)
        if isinstance(self.solver, GptqSolver):
            pivots = UNSEEN * self.solver.pivots(reader.hessian, reader.grid)
        else:
            pivots = reader.hessian.diagonal()
        squares = inputs.square()
        mean_count = torch.mv(squares.t(), count) / squares.sum(0).clamp(min=1e-30)  # by column
        return SmoothReader(**vars(reader), pivots=pivots * mean_count, count=count, rounded=self.rounded)

    def search(self, losses: Losses, producer: Producer, entering: Entering) -> Tensor | None:
        """See `ColumnScaling`: returns the whole text's scale, with the exponent and floor that are best if
        each half's scale is judged on the other half."""
        halves = sum(statistics[Statistic.FOURTH] * share for statistics, share in entering)
        column = column_size(losses.readers)
        tried = (candidates(fourth, column) for fourth in (*halves, halves.mean(0)))
        best, least = None, ENOUGH_OF_LOSS * float(sum(losses.plain))
        for scales in zip(*tried, strict=True):
            first, second, both = (in_few_digits(producer.tied(scale.log()).exp()) for scale in scales)
            loss = sum(reader.crossed(first, second) for reader in losses.readers).item()
            if loss < least:
                best, least = both, loss
        return best


def column_size(readers: Sequence[SmoothReader]) -> Tensor:
    """Return the root mean square of each column, `[in]`, at least FLOOR times the mean."""
    rows = sum(len(reader.weight) for reader in readers)
    size = (sum(reader.weight.square().sum(0) for reader in readers) / rows).sqrt()
    return size.clamp(min=FLOOR * size.mean().clamp(min=TINY))


def candidates(fourth: Tensor, column: Tensor) -> Iterator[Tensor]:
    """Yield candidate scales `[in]`. fourth: mean fourth powers of channels; column: `column_size`."""
    size = fourth.pow(0.25)
    for g in (torch.ones_like(column), column):
        outputs = size * g
        relative = outputs / outputs.median().clamp(min=TINY)
        for floor in FLOORS:
            for exponent in EXPONENTS:
                yield (relative + floor).pow(exponent) / g


@dataclass(frozen=True)
class SmoothReader(FedReader):
    """A reader with the loss of both roundings. count: weight of each row of `inputs`, `[few]`."""

    count: Tensor = field(kw_only=True)
    rounded: Callable[[Tensor], Tensor] = field(kw_only=True)

    def loss(self, scale: Tensor) -> Tensor:
        """Return the loss of both roundings under a scale `[in]`."""
        return self.counted(self.rounding(scale) + self._by_inputs(scale))

    def crossed(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the mean `loss` on both halves of the inputs, each with the other half's scale."""
        half = len(self.inputs) // 2
        halves = (second, slice(0, half)), (first, slice(half, None))
        return sum(
            (len(self.inputs[tokens]) / len(self.inputs))
            * replace(self, inputs=self.inputs[tokens], count=self.count[tokens]).loss(scale)
            for scale, tokens in halves
        )

    def _by_inputs(self, scale: Tensor) -> Tensor:
        """Return `2 / T Σ_t c_t |(Q(x_t / s) s - x_t) Wᵀ|²` of every row, `[out]`."""
        inputs = self.inputs / scale
        missed = (self.rounded(inputs) - inputs) * scale
        return (missed @ self.weight.t()).square_().t() @ (self.count * (2 / len(inputs)))
