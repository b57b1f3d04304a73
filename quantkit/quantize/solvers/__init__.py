"""Solvers: choose values on a grid. They take matrices and return matrices."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight
from quantkit.layouts import Statistic


@dataclass(frozen=True)
class Solved:
    """One quantized linear.

    error: `tr(dW H dWᵀ) / tr(W H Wᵀ)`, the relative squared error of the linear's output on the calibration
    tokens, for an even sample of rows (`measured`); None if there was no Hessian. rtn_error: the same for
    round to nearest; None if the linear was only rounded to nearest. fallback: the reason why the requested
    solver was not used; None if it was. notes: other facts for the user.
    """

    weight: QuantizedWeight
    error: float | None
    rtn_error: float | None = None
    fallback: str | None = None
    notes: tuple[str, ...] = ()


def clipping(weight: QuantizedWeight) -> tuple[str, ...]:
    """Return a note for the user if scales exceed float16's range."""
    count = weight.grid.clipped(weight.params)
    return (f"{count} scales lie at the end of float16's range",) if count else ()


class Solver(ABC):
    """The rule that chooses values on a grid. needs: the statistics that it uses; empty if data-free. A
    solver that needs DRIFT has `damp`, the damping of the Hessian; one that needs PEAK has `outliers`.
    feeds_back: error feedback, which factorizes the Hessian."""

    needs: frozenset[Statistic]
    feeds_back: ClassVar[bool] = False

    @abstractmethod
    def solve(
        self,
        weights: Sequence[Tensor],
        grids: Sequence[Grid],
        hessian: Tensor | None = None,
        curvatures: Sequence[Tensor | None] = (),
    ) -> list[Solved]:
        """Quantize the weights `[out, in]` float32 of one site. hessian: of its inputs, `[in, in]`; None for
        a data-free solver. curvatures: G of each linear's outputs, `[out, out]`, or None if no gradient
        reached it; empty if not measured."""

    def solve_many(self, sites: Sequence[tuple]) -> list[list[Solved]]:
        """Return the results of `solve` for independent sites, given its arguments for each."""
        return [self.solve(*site) for site in sites]


MEASURED_ROWS = 1024  # largest sample of a linear's rows on which its errors are measured
WIDTH = 128  # columns of a loss computed at a time
ACCELERATED_WIDTH = 2048  # the same on an accelerator, where launches count


def measured(rows: int) -> slice:
    """Return an even sample of at most MEASURED_ROWS of a linear's rows."""
    return slice(None, None, -(-rows // MEASURED_ROWS))


def row_losses(delta: Tensor, hessian: Tensor) -> Tensor:
    """Return `dw H dwᵀ` of every row of `delta [(sites,) out, in]`, float32; reads H's upper triangle."""
    total = delta.new_zeros(delta.shape[:-1])
    add = Tensor.addmm_ if delta.ndim == 2 else Tensor.baddbmm_
    width = WIDTH if delta.is_cpu else ACCELERATED_WIDTH
    for start in range(0, delta.shape[-1], width):
        block = slice(start, start + width)
        product = delta[..., block] @ hessian[..., block, block]
        if start:
            add(product, delta[..., :start], hessian[..., :start, block], alpha=2)
        total += product.mul_(delta[..., block]).sum(-1)
    return total


def loss(delta: Tensor, hessian: Tensor) -> float:
    """Return `tr(dW H dWᵀ)` for `delta [out, in]`."""
    return row_losses(delta, hessian).sum().item()
