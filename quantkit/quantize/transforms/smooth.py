"""smooth: columns are scaled for the sake of inputs that are rounded, too, as SmoothQuant does.

Where a client rounds the inputs of a linear token by token, one large channel makes the step of its token
large for all others. SmoothQuant (Xiao et al. 2022, arXiv:2211.10438, equation 4) divides channels by

    s_j = max|x_j|^α / max|w_j|^(1-α)

and multiplies the columns that read them; α is one for the whole model, and norms alone are divided. Here s
is folded into whatever produces the inputs (fold.py), so also into v for o and up for down, and each fold
has its own.

The loss of an s knows both roundings: of the weights `Σ_j D_j / s_j² |Q(W s)_j - (W s)_j|²`, with the
pivots D that error feedback leaves (auto.py), four times, as they are those of the text at hand, which it
makes up for better than for any other; or with H's bare diagonal before round to nearest; of the
inputs `Σ_t c_t |(Q(x_t / s) s - x_t) Wᵀ|²`, on a few tokens as they are. Tokens count by the share of their
outputs that is lost (c), since a norm follows: else a few large ones decide for all.

Tried are `s_j = (n_j g_j + f median(n g))^a / g_j`: n_j is the 4-norm of a channel over tokens of equal
size, and g_j the root mean square of its column, which makes s the same for models that differ by such
scales alone, or 1. A channel that hardly fired in the text is not scaled up by all that would allow, so f
is not 0. Which of them is best is cross-validated: s of one half of the text, its loss on the other.
Without that down projections of the demo model were to lose a third less, and lost more than before on a
text of another kind. Of the inputs' part of the loss on such a text q/k/v keep 0.46 by these, 0.48 by
SmoothQuant's own at its best α and 0.41 by descent on all of s; gate and up 0.76, 0.86 and 0.76; down 0.90,
1.09 and 0.97, so that what descent gains is what it knows too well. Counted once, weights lost twice as much
on other texts as without any s; four times, less than half of that is left, and 4 % less divergence in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantkit.quantize.solvers import SiteStatistics, Solver
from quantkit.quantize.transforms.auto import FLOOR, ROWS
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import Losses, Reader, Score, in_few_digits, sample_step

EXPONENTS = 0.5, 0.75, 1.0
FLOORS = 0.3, 1.0  # of the median channel, which is added to each
ENOUGH = 0.98  # share of the loss that a scale has to stay below
UNSEEN = 4.0  # times the loss that error feedback leaves of weights: on another text it makes up for less
TINY = torch.finfo(torch.float32).tiny
QUIET = 0.1  # of the mean token's outputs: those of smaller ones are counted as if they were so large


@dataclass(frozen=True)
class SmoothScore(Score):
    """solver: what rounds the weights. rounded: inputs `[tokens, in]` as clients round them."""

    solver: Solver
    rounded: Callable[[Tensor], Tensor]
    needs = frozenset({"hessian", "inputs", "fourth"})
    sample = 1 / 8

    def enough(self, producer: nn.Module) -> float:
        """See `Score`."""
        return ENOUGH

    def losses(self, readers: Sequence[Reader]) -> Losses:
        """Of both roundings, on a sample of the rows. Whole rows of 8 bits lose little by a range that covers
        them."""
        step = sample_step(readers, ROWS)
        return Losses([SmoothReader.of(reader, self, step) for reader in readers])

    def search(
        self, losses: Losses, producer: Producer, entering: Sequence[tuple[SiteStatistics, float]]
    ) -> Tensor | None:
        """See `Score`: the scale of both halves, by the exponent and floor that serve each half best
        which the scale was not made of."""
        halves = sum(part.fourth * share for part, share in entering)
        column = column_size(losses.readers)
        tried = (candidates(fourth, column) for fourth in (*halves, halves.mean(0)))
        best, least = None, ENOUGH * float(sum(losses.plain))
        for scales in zip(*tried, strict=True):
            first, second, both = (in_few_digits(producer.tied(scale.log()).exp()) for scale in scales)
            loss = sum(reader.crossed(first, second) for reader in losses.readers).item()
            if loss < least:
                best, least = both, loss
        return best


def column_size(readers: Sequence[SmoothReader]) -> Tensor:
    """Root mean square of each column, `[in]`; one that hardly lives is taken for larger."""
    rows = sum(len(reader.weight) for reader in readers)
    size = (sum(reader.weight.square().sum(0) for reader in readers) / rows).sqrt()
    return size.clamp(min=FLOOR * size.mean().clamp(min=TINY))


def candidates(fourth: Tensor, column: Tensor) -> Iterator[Tensor]:
    """Scales `[in]` by the mean fourth powers of channels and the size of columns, `[in]` both."""
    size = fourth.pow(0.25)
    for g in (torch.ones_like(column), column):
        part = size * g
        part = part / part.median().clamp(min=TINY)
        for floor in FLOORS:
            for exponent in EXPONENTS:
                yield (part + floor).pow(exponent) / g


@dataclass(frozen=True)
class SmoothReader(Reader):
    """pivots: what an error in each column costs, `[in]`. count: what each of `inputs` does, `[few]`."""

    pivots: Tensor = field(kw_only=True)
    count: Tensor = field(kw_only=True)
    rounded: Callable[[Tensor], Tensor] = field(kw_only=True)

    @staticmethod
    def of(reader: Reader, score: SmoothScore, step: int) -> SmoothReader:
        """Every `step`-th row of a reader."""
        reader, solver, inputs = reader.every(step), score.solver, reader.inputs
        outputs = (inputs @ reader.weight.t()).square_().sum(1)
        count = outputs.mean() / (outputs + QUIET * outputs.mean()).clamp(min=TINY)
        pivots = (
            UNSEEN * solver.pivots(reader.hessian, reader.grid)
            if hasattr(solver, "pivots")
            else reader.hessian.diagonal()
        )
        squares = inputs.square()
        heard = torch.mv(squares.t(), count) / squares.sum(0).clamp(min=1e-30)
        pivots = pivots * heard  # of tokens that count so
        return SmoothReader(**vars(reader), pivots=pivots, count=count, rounded=score.rounded)

    def loss(self, scale: Tensor | None) -> Tensor:
        """What both roundings lose under a scale `[in]`, or without."""
        return self.counted(self._by_weights(scale) + self._by_inputs(scale))

    def crossed(self, first: Tensor, second: Tensor) -> Tensor:
        """`loss` on either half of the inputs with a scale that comes of the other half."""
        half = len(self.inputs) // 2
        parts = (second, slice(0, half)), (first, slice(half, None))
        return sum(
            (len(self.inputs[part]) / len(self.inputs))
            * replace(self, inputs=self.inputs[part], count=self.count[part]).loss(scale)
            for scale, part in parts
        )

    def _by_weights(self, scale: Tensor | None) -> Tensor:
        """`Σ_j D_j / s_j² |Q(W s)_j - (W s)_j|²` of every row, `[out]`."""
        scaled = self.weight.clone() if scale is None else self.weight * scale
        groups = scaled.view(-1, self.grid.group_size)
        values = self.grid.nearest(groups.clone(), self.grid.fit(groups)).view_as(scaled)
        return values.sub_(scaled).square_() @ (
            self.pivots if scale is None else self.pivots / scale.square()
        )

    def _by_inputs(self, scale: Tensor | None) -> Tensor:
        """`2 / T Σ_t c_t |(Q(x_t / s) s - x_t) Wᵀ|²` of every row, `[out]`."""
        inputs = self.inputs if scale is None else self.inputs / scale
        missed = self.rounded(inputs) - inputs
        missed = missed if scale is None else missed * scale
        return (missed @ self.weight.t()).square_().t() @ (self.count * (2 / len(inputs)))
