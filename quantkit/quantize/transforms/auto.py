"""auto: columns are scaled where error feedback loses less by it, and nowhere else.

Error feedback makes up for correlations, so what an error in column j costs is no longer `H_jj` but the
pivot `D_j` that is left of it once the columns behind have taken over what they can: H is `U D Uᵀ`, and the
loss of GPTQ's sweep is `Σ_j D_j e_j²` with e_j the rounding error of the column when its turn comes (theorem
6 of QuIP, Chee et al. 2023, arXiv:2307.13304). Rounding to nearest has errors of the same size, so with the
pivots it says what a scale is worth without any sweep: `Σ_j D_j / s_j² · |Q(W s)_j - (W s)_j|²`. The pivots
are those without a scale, because one of H's rows and columns is one of A's rows in `H = A Aᵀ`. On the demo
model the loss that is left, by this choice or that of a sweep over some rows, is within a percent of the best
candidate's.

Candidates come from the weights: `s_j = |W_:j|^-b · D_j^(a/2)`. With b = 1 all columns of a group are equally
large, whatever a model has in its norms. AWQ's `mean|x|^α` is not among them: it scales up columns for their
inputs alone, of which feedback has taken care already, and gained in no site of the demo model.

Pivots are taken of a sample of the tokens. Solving goes by all of them, each site behind those before it.
Experts stay as they are, and so does the norm before a layer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.grids.grid import Grid
from quantkit.quantize.solvers import SiteStatistics
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import Losses, Reader, Score, in_few_digits, sample_step

EXPONENTS = (1.0, 0.0), (0.5, 0.0), (0.75, 0.25)  # (b, a)
# Share of the loss that a scale has to stay below, where a norm is divided (1) or rows of a linear (2). With
# 0.98 for rows, too, down projections of the demo model lose 5 percent less, but its KL divergence is 2
# percent higher in 3 bits and 5 in 2.
ENOUGH = {1: 0.98, 2: 0.85}
ROWS = 1024  # of a fold that are looked at
FLOOR = 1e-3  # of the mean column: one that hardly lives is not scaled up to the others


@dataclass(frozen=True)
class FeedbackScore(Score):
    """solver: whose loss is to fall."""

    solver: GptqSolver
    needs = frozenset({"hessian"})
    sample = 1 / 8

    def rounded_on(self, grid: Grid) -> Grid:
        """What the solver rounds on."""
        return grid

    def enough(self, producer: nn.Module) -> float:
        """See `Score`."""
        return ENOUGH[producer.weight.ndim]

    def losses(self, readers: Sequence[Reader]) -> Losses:
        """By pivots, on a sample of the rows."""
        step = sample_step(readers, ROWS)
        return Losses([FedReader.of(reader, self.solver, step) for reader in readers])

    def search(
        self, losses: Losses, producer: Producer, entering: Sequence[tuple[SiteStatistics, float]]
    ) -> Tensor | None:
        """See `Score`. Columns of several linears count by their rows and tokens."""
        best, least = None, float(sum(losses.plain))
        for b, a in EXPONENTS:
            scale = in_few_digits(producer.tied(candidate(losses.readers, b, a)).exp())
            loss = losses.of(scale, limit=least)
            if loss < least:
                best, least = scale, loss
        return best


def candidate(readers: Sequence[FedReader], b: float, a: float) -> Tensor:
    """`log s` of the columns, `[in]`."""
    counts = [reader.weight.new_ones(len(reader.weight)) for reader in readers]
    counts = [
        one if reader.share is None else reader.share for one, reader in zip(counts, readers, strict=True)
    ]
    rows = sum(count.sum() for count in counts).clamp(min=1e-30)
    both = list(zip(counts, readers, strict=True))
    weight = sum(torch.mv(reader.weight.square().t(), count) for count, reader in both) / rows
    pivots = sum(count.sum() * reader.pivots for count, reader in both) / rows
    column = weight.sqrt().clamp(min=1e-30)
    column = column.clamp(min=FLOOR * column.mean())
    pivot = pivots.sqrt().clamp(min=1e-30)
    return a * pivot.clamp(min=FLOOR * pivot.mean()).log() - b * column.log()


@dataclass(frozen=True)
class FedReader(Reader):
    """pivots: what an error in each column costs, `[in]`."""

    pivots: Tensor = field(kw_only=True)

    @staticmethod
    def of(reader: Reader, solver: GptqSolver, step: int) -> FedReader:
        """Every `step`-th row of a reader."""
        pivots = solver.pivots(reader.hessian, reader.grid)
        return FedReader(**vars(reader.every(step)), pivots=pivots)

    def loss(self, scale: Tensor | None) -> Tensor:
        """`Σ_j D_j / s_j² |Q(W s)_j - (W s)_j|²`, ranges fitted as the solver fits them."""
        scaled = self.weight if scale is None else self.weight * scale
        pivots = self.pivots if scale is None else self.pivots / scale.square()
        total = scaled.new_zeros(len(scaled))
        for start in range(0, scaled.shape[1], self.grid.group_size):
            span = slice(start, start + self.grid.group_size)
            part = scaled[:, span].contiguous()
            missed = self.grid.nearest(part.clone(), self.grid.fit(part, pivots[span])).sub_(part)
            total += missed.square_() @ pivots[span]
        return self.counted(total)
