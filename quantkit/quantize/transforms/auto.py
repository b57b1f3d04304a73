"""auto: scale columns where this lowers the loss after error feedback.

After error feedback an error in column j costs not `H_jj` but the pivot `D_j` of `H = U diag(D) Uᵀ`: the loss
of GPTQ's sweep is `Σ_j D_j e_j²`, with e_j the rounding error of column j at its turn (theorem 6 of QuIP,
Chee et al. 2023, arXiv:2307.13304). Rounding to nearest has errors of the same size, so
`Σ_j D_j / s_j² · |Q(W s)_j - (W s)_j|²` estimates the loss under a scale s without a sweep. On the bundled
model this choice is within a percent of the best candidate's loss.

Candidates come from the weights: `s_j = |W_:j|^-b · D_j^(a/2)`. With b = 1 all columns of a group are equally
large. Pivots are computed from a sample of the tokens; the solver uses all tokens. Experts are not scaled,
nor is the norm before a layer of experts. Blocks whose columns are alike are skipped: scales would lower the
estimate by a few percent, and the KL divergence would stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.grids.parallel import rows_at_once
from quantkit.layouts import Statistic
from quantkit.quantize.calibrate.sites import Block
from quantkit.quantize.solvers.gptq import GptqSolver
from quantkit.quantize.transforms.fold import Producer
from quantkit.quantize.transforms.scaling import ColumnScaling, Entering, Losses, Reader

EXPONENTS = (1.0, 0.0), (0.5, 0.0), (0.75, 0.25)  # (b, a)
# A scale is used if its loss is below this share of the unscaled loss: by number of dimensions of the divided
# weight, 1 for a norm and 2 for a linear. With 0.98 for linears, the KL divergence of the demo model is 2
# percent higher in 3 bits and 5 percent higher in 2 bits.
ENOUGH = {1: 0.98, 2: 0.85}
SAMPLED_ROWS = 512  # rows of a fold that the search uses
TEMPORARIES = 8  # temporary tensors as large as the groups that are searched together
FLOOR = 1e-3  # share of the mean column: smaller columns count as this large
SPREAD = 8  # a block is scaled if a site's largest column is more than so many times its smallest


@dataclass(frozen=True)
class FeedbackScaling(ColumnScaling):
    """Scaling by the loss of error feedback. solver: the GPTQ solver, which computes the pivots."""

    solver: GptqSolver
    needs = frozenset({Statistic.HESSIAN})
    sample = 1 / 8
    rows = SAMPLED_ROWS
    plain = False
    enough = ENOUGH

    def may_help(self, block: Block) -> bool:
        """See `ColumnScaling`: returns whether the columns of some site differ much in size."""
        weights = (
            [block.module.get_submodule(spec.local).weight for spec in block.quantized(site)]
            for site in block.around
        )
        return any(spread(linears) > SPREAD for linears in weights)

    def reader(self, reader: Reader) -> FedReader:
        """See `ColumnScaling`: returns a reader whose loss uses pivots."""
        return FedReader(**vars(reader), pivots=self.solver.pivots(reader.hessian, reader.grid))

    def search(self, losses: Losses, producer: Producer, entering: Entering) -> Tensor | None:
        """See `ColumnScaling`. Linears are weighted by their numbers of rows and tokens."""
        best, least = None, float(sum(losses.plain))
        for b, a in EXPONENTS:
            scale = in_few_digits(producer.tied(candidate(losses.readers, b, a)).exp())
            loss = losses.of(scale, limit=least)
            if loss < least:
                best, least = scale, loss
        return best


def spread(weights: Sequence[Tensor]) -> float:
    """Return the ratio of the largest to the smallest column of `weights [out_k, in]`; columns of 0 aside."""
    columns = sum(torch.linalg.vector_norm(w, dim=0, dtype=torch.float32).square_() for w in weights).sqrt_()
    columns = columns[columns > FLOOR * columns.mean()]
    return (columns.max() / columns.min()).item() if len(columns) else 1.0


def candidate(readers: Sequence[FedReader], b: float, a: float) -> Tensor:
    """Return the logarithm of the candidate scale with exponents b and a, `[in]`."""
    rows = sum(reader.share.sum() for reader in readers).clamp(min=1e-30)
    weight = sum(torch.mv(reader.weight.square().t(), reader.share) for reader in readers) / rows
    pivots = sum(reader.share.sum() * reader.pivots for reader in readers) / rows
    column = weight.sqrt().clamp(min=1e-30)
    column = column.clamp(min=FLOOR * column.mean())
    pivot = pivots.sqrt().clamp(min=1e-30)
    return a * pivot.clamp(min=FLOOR * pivot.mean()).log() - b * column.log()


def in_few_digits(scale: Tensor) -> Tensor:
    """Return a scale with `max(s) min(s) = 1` in bfloat16, so that the order of sums does not matter."""
    return (scale / (scale.max() * scale.min()).sqrt()).bfloat16().float()


@dataclass(frozen=True)
class FedReader(Reader):
    """A reader with the loss of error feedback. pivots: cost of an error in each column, `[in]`."""

    pivots: Tensor = field(kw_only=True)

    def loss(self, scale: Tensor) -> Tensor:
        """Return the weighted sum of `rounding` over all rows."""
        return self.counted(self.rounding(scale))

    def rounding(self, scale: Tensor) -> Tensor:
        """Return `Σ_j D_j / s_j² |Q(W s)_j - (W s)_j|²` of every row, `[out]`, with the solver's ranges."""
        scaled, pivots = self.weight * scale, self.pivots / scale.square()
        rows, size = len(scaled), self.grid.group_size
        groups, costs = scaled.unflatten(1, (-1, size)).transpose(0, 1), pivots.view(-1, size)
        at_once = rows_at_once(scaled.device, rows * size, TEMPORARIES) if self.grid.many else 1
        total = scaled.new_zeros(rows)
        for chunk, cost in zip(groups.split(at_once), costs.split(at_once), strict=True):
            chunk = chunk.flatten(0, 1).contiguous()
            missed = self.grid.nearest(chunk.clone(), self.grid.fit(chunk, cost.squeeze(0))).sub_(chunk)
            for squares, weights in zip(missed.square_().split(rows), cost, strict=True):
                total.addmv_(squares, weights)
        return total
