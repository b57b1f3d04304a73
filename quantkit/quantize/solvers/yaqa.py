"""YAQA: error feedback from both sides of a linear (Tseng et al. 2025, arXiv:2505.22988).

GPTQ minimises the error of a linear's outputs and ignores the rest of the model. With G, the curvature of the
model's own loss on the output side (`quantize/calibrate/curvature.py`), the loss of an error `E = W - Ŵ` is
`tr(G E H Eᵀ)`: errors of two rows together may cost less than either alone. Two-sided GPTQ is Babai's nearest
plane for the Kronecker product `G ⊗ H` (section 3.2). With `G = B Bᵀ`, B upper triangular in blocks of rows,
rows `R` are quantized for a target that compensates for the errors of all earlier rows P,

    W_R + (B_PR B_RR⁻¹)ᵀ E_P,

by the one-sided sweep over H. With one row per block this is exactly Babai's algorithm; here the rows of a
block share the sweep's kernel launches. Then `refine/both_sides.py` chooses codes and scales again, given all
rows. Rows with large curvature come first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, QuantizedWeight, group, stack
from quantkit.grids.grid import rows as rows_of
from quantkit.layouts import Statistic
from quantkit.quantize.solvers import Solved, Solver, clipping, loss, measured
from quantkit.quantize.solvers.columns import Chosen
from quantkit.quantize.solvers.gptq import GptqSolver, sweep
from quantkit.quantize.solvers.hessian import Indefinite, damped, factorize, unit_upper
from quantkit.quantize.solvers.order import column_order, group_order, restored
from quantkit.quantize.solvers.refine import both_sides, by_vector

YAQA_ROWS = 32  # rows of one sweep, quantized independently
OUTPUT_DAMP = 0.03  # share of G's mean diagonal that is added to its diagonal
INDEFINITE = "its curvature is not positive definite: quantized by its inputs alone"
UNREACHED = "no gradient reached it: quantized by its inputs alone"


class YaqaSolver(GptqSolver):
    """Two-sided error feedback with GPTQ's options."""

    @property
    def needs(self) -> frozenset[Statistic]:
        return super().needs | {Statistic.CURVATURE}

    def solve(
        self,
        weights: Sequence[Tensor],
        grids: Sequence[Grid],
        hessian: Tensor | None = None,
        curvatures: Sequence[Tensor | None] = (),
    ) -> list[Solved]:
        """Solve weights `[out_k, in]` float32. A linear keeps GPTQ's result, with a note, if its two-sided
        loss is lower or no gradient arrived; without curvatures (the head) all do."""
        one_sided = super().solve(weights, grids, hessian)
        if not curvatures:
            return one_sided
        solved = []
        for weight, curvature, plain in zip(weights, curvatures, one_sided, strict=True):
            if curvature is None:
                plain = replace(plain, notes=(*plain.notes, UNREACHED))
            elif not plain.fallback:  # H could be used
                plain = self._better(weight, plain, hessian, curvature)
            solved.append(plain)
        return solved

    def solve_many(self, sites: Sequence[tuple]) -> list[list[Solved]]:
        """See `Solver`: one site after another."""
        return Solver.solve_many(self, sites)

    def _better(self, weight: Tensor, plain: Solved, hessian: Tensor, curvature: Tensor) -> Solved:
        """Return the result of two-sided feedback, or `plain` if that has a lower two-sided loss."""
        try:
            chosen = self.quantize_both_sides(weight, plain.weight.grid, hessian, curvature)
        except Indefinite:
            return replace(plain, notes=(*plain.notes, INDEFINITE))
        delta, before = chosen.values() - weight, plain.weight.values() - weight
        lost, plain_lost = (two_sided_loss(error, hessian, curvature) for error in (delta, before))
        if not lost <= plain_lost:  # not a number loses, too
            note = f"yaqa's loss {lost:.3g} is above gptq's {plain_lost:.3g}: it is gptq's"
            return replace(plain, notes=(*plain.notes, note))
        sample = measured(len(weight))
        error = loss(delta[sample], hessian) / max(loss(weight[sample], hessian), 1e-30)
        return replace(plain, weight=chosen, error=error, notes=clipping(chosen))

    def quantize_both_sides(
        self, weight: Tensor, grid: Grid, hessian: Tensor, curvature: Tensor
    ) -> QuantizedWeight:
        """Quantize `weight [out, in]`. Raises Indefinite if damped H or G is not positive definite."""
        order = column_order(hessian.diagonal(), grid, self.act_order)
        rows = torch.argsort(curvature.diagonal(), descending=True, stable=True)
        A, damping, _ = factorize(hessian, self.damp, order)
        B, output_damping, _ = factorize(curvature, OUTPUT_DAMP, rows)
        H, G = damped(hessian, order, damping), damped(curvature, rows, output_damping)
        fixed = []
        if grid.spans_matrix:
            params = rows_of(grid.fit_matrix(weight), rows)
            fixed = [group(params, k) for k in group_order(order, grid).tolist()]
        Wt = weight.t().index_select(0, order).index_select(1, rows)
        vectors = grid.vector_size > 1  # refined block by block, for G = 1
        one_sided = partial(by_vector.refine, grid=grid, hessian=H, cycles=self.refine if vectors else 0)
        chosen = feedback(Wt, *unit_upper(A), B, grid, fixed, one_sided)
        del A, B
        if not vectors:
            both_sides.refine(chosen, grid, H, G, self.refine)
        back = torch.argsort(rows)
        params = [rows_of(part, back) for part in chosen.params]
        return restored(chosen.codes.index_select(1, back), params, order, grid, self.act_order)[0]


def feedback(
    Wt: Tensor, U: Tensor, D: Tensor, B: Tensor, grid: Grid, fixed: Sequence, improve: Callable[..., None]
) -> Chosen:
    """Quantize `Wt [in, out]` by blocks of rows of W, each with a target that compensates for the errors of
    earlier blocks. U, D, fixed: see `sweep`; B `[out, out]`: `G = B Bᵀ`, changed in place. improve: improves
    the sweep's choice for a block of rows in place."""
    E = torch.empty_like(Wt)
    blocks = []
    for start in range(0, Wt.shape[1], YAQA_ROWS):
        rows = slice(start, min(start + YAQA_ROWS, Wt.shape[1]))
        mixed = torch.linalg.solve_triangular(B[rows, rows], B[:start, rows], upper=True, left=False)
        shift = E[:, :start] @ mixed
        chosen = sweep(Wt[:, rows] + shift, U, D, grid, [rows_of(params, rows) for params in fixed])
        improve(chosen)
        torch.sub(chosen.E, shift, out=E[:, rows])
        blocks.append(chosen)
    params = [stack(groups) for groups in zip(*(block.params for block in blocks), strict=True)]
    return Chosen(torch.cat([block.codes for block in blocks], 1), E, params, Wt.new_zeros(Wt.shape[1]))


def two_sided_loss(delta: Tensor, hessian: Tensor, curvature: Tensor) -> float:
    """Return `tr(G dW H dWᵀ)` for `delta [out, in]`."""
    return ((delta @ hessian) * (curvature @ delta)).sum().item()
