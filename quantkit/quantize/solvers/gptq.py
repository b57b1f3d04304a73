"""GPTQ: accurate post-training quantization by error feedback (Frantar et al. 2022, arXiv:2210.17323).

For a linear with inputs `X [tokens, in]`, replacing `W` by `Ŵ` costs the loss `tr(E H Eᵀ)` with the error
`E = W - Ŵ` and the Hessian `H = 2 XᵀX` (section 3.1). Columns are quantized one after another. Before its
turn, each column is moved to compensate for the errors of the columns before it.

The paper moves all later columns by a row of the Cholesky factor of `H⁻¹` (section 3.3, step 3). With
`H = A Aᵀ`, A upper triangular, that factor is `A⁻¹`, and at its turn column j has been moved by
`Σ_{k<j} E_k U_kj` with `U = A / diag A`: the same numbers without inverting anything (theorem 6 of QuIP, Chee
et al. 2023, arXiv:2307.13304, where H is U D Uᵀ).

`order.py` orders the columns, and `hessian.py` factorizes H. `columns.py` quantizes the columns of a batch
(section 3.3, step 2), `vectors.py` those of code books. `refine/` improves the result, and `baseline.py`
compares it with round to nearest; the paper has neither. `tests/reference_gptq.py` follows the paper
literally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.grids.grid import Grid, group, join, stack
from quantkit.layouts import Statistic
from quantkit.models.machine.device import is_accelerator, tf32_products
from quantkit.quantize.solvers import Solved, Solver
from quantkit.quantize.solvers.baseline import Attempt, better, nearest
from quantkit.quantize.solvers.batching import add_product, can_stack, reordered
from quantkit.quantize.solvers.columns import Chosen, Columns
from quantkit.quantize.solvers.hessian import Indefinite, damped, factorize, unit_upper
from quantkit.quantize.solvers.order import column_order, group_order, restored
from quantkit.quantize.solvers.refine import refine
from quantkit.quantize.solvers.replay import Replays
from quantkit.quantize.solvers.vectors import Vectors


@dataclass(frozen=True)
class GptqSolver(Solver):
    """damp: share of the mean Hessian diagonal that is added to the diagonal; by default the paper's.
    act_order: `none`, `group` or `full` (`order.py`). refine: cycles of coordinate descent after the sweep; 0
    is the paper's algorithm. target: the output to reproduce: the linear's `own` for its present inputs, or
    the `original` model's; then the caller gives weights from `calibrate/statistics.py::retarget`.
    """

    damp: float = 0.01
    act_order: str = "group"
    refine: int = 2
    target: str = "original"
    feeds_back: ClassVar[bool] = True

    @cached_property
    def _replays(self) -> Replays:
        return Replays()

    @property
    def needs(self) -> frozenset[Statistic]:
        drift = {Statistic.DRIFT} if self.target == "original" else set()
        return frozenset({Statistic.HESSIAN} | drift)

    def solve(
        self, weights: Sequence[Tensor], grids: Sequence[Grid], hessian: Tensor | None = None, *unused: Any
    ) -> list[Solved]:
        """Solve weights `[out_k, in]` float32; those that share a grid are quantized as one matrix. hessian:
        `[in, in]` float32, symmetric. Sites of equal shape are solved together if stacked, `[sites, out_k,
        in]` and `[sites, in, in]`: the results of the first linear in all sites come first.

        Raises Indefinite if one of several sites needs more damping.
        """
        assert hessian is not None, "gptq works from the Hessian"
        solved: dict[int, list[Solved]] = {}
        for grid in dict.fromkeys(grids):
            members = [k for k, other in enumerate(grids) if other == grid]
            try:
                attempt = self.quantize([weights[k] for k in members], grid, hessian)
            except Indefinite as error:
                if hessian.ndim > 2:
                    raise
                attempt, reason = None, str(error)
            start = 0
            for k in members:
                rows = slice(start, start := start + weights[k].shape[-2])
                if attempt:
                    solved[k] = better(attempt, weights[k], rows, grid, hessian)
                else:
                    solved[k] = [nearest(weights[k], grid, hessian, reason)]
        return [result for k in range(len(weights)) for result in solved[k]]

    def solve_many(self, sites: Sequence[tuple]) -> list[list[Solved]]:
        """See `Solver`. Sites of equal shape, like experts', are one batch. (A CPU adds up products of few
        rows, or an odd number, differently.)"""
        weights, grids, hessians, *_ = zip(*sites, strict=True)
        if can_stack(weights, grids):
            stacked = [torch.stack(linear) for linear in zip(*weights, strict=True)]
            try:
                solved = self.solve(stacked, grids[0], torch.stack(hessians))
                return [solved[k :: len(sites)] for k in range(len(sites))]
            except Indefinite:
                pass  # a site needs more damping than the others
        return super().solve_many(sites)

    def pivots(self, hessian: Tensor, grid: Grid) -> Tensor:
        """Return `D [in]` of `H = U diag(D) Uᵀ` in the order of quantization: the cost of a squared error in
        each column after later columns compensate. If H has no factorization, the diagonal of H."""
        D = hessian.diagonal().clone()
        order = column_order(D, grid, self.act_order)
        try:
            A, *_ = factorize(hessian, self.damp, order)
        except Indefinite:
            return D
        return D.index_copy_(0, order, A.diagonal().square())

    def quantize(self, weights: Sequence[Tensor], grid: Grid, H: Tensor) -> Attempt:
        """Quantize `weights [(sites,) out_k, in]` on `grid`, stacked as one matrix; H `[(sites,) in, in]`.

        Raises Indefinite if H has no factorization.
        """
        H = H.mT  # where a scale divided the inputs, rounding leaves H only nearly symmetric
        order = column_order(H.diagonal(dim1=-2, dim2=-1), grid, self.act_order)
        A, damping, note = factorize(H, self.damp, order)
        Wt = reordered((torch.cat(weights, -2) if weights[1:] else weights[0]).mT, order)
        Wt = Wt.movedim(-2, 0).flatten(1)
        fixed = []
        if grid.spans_matrix:
            params = stack([grid.fit_matrix(weight) for weight in weights])
            fixed = [group(params, k) for k in group_order(order, grid).tolist()]
        replays = self._replays if is_accelerator(H.device) and grid.vector_size == 1 else None
        U, D = unit_upper(A)
        del A
        # an error of TF32 is far below a step of the grid, and what it changes is in E like any error
        with tf32_products(H.device):
            chosen = sweep(Wt, U, D, grid, fixed, replays)
            del U  # as large as the copy of H that refinement changes
            if self.refine:
                refine(Wt, chosen, grid, damped(H, order, damping), self.refine, replays)
        quantized = restored(chosen.codes, chosen.params, order, grid, self.act_order)
        lost = torch.stack([chosen.lost, chosen.E.square_().sum(0)]).view(2, len(quantized), -1)
        lost[1] *= damping
        return Attempt(quantized, lost, note, grid.clipped(join(chosen.params)) > 0)


def sweep(
    Wt: Tensor, U: Tensor, D: Tensor, grid: Grid, fixed: Sequence = (), replays: Replays | None = None
) -> Chosen:
    """Quantize the columns of W, rows of `Wt [in, out]`, in order with error feedback through U and D.

    fixed: the parameters of each group, if `grid.spans_matrix`; groups of other grids are fitted when the
    sweep reaches them, with the pivots D as importance. D is the cost of a rounding error in column j after
    later columns compensate. (With the diagonal of H the KL divergence of the bundled model is 5 percent
    higher, 2 after refinement.) replays: None on a CPU, and for code books.
    """
    columns = (Columns if grid.vector_size == 1 else Vectors)(Wt, U, grid)
    codes = torch.empty(Wt.shape, dtype=torch.uint8, device=Wt.device)
    chosen = Chosen(codes, torch.zeros_like(Wt), [], Wt.new_zeros(Wt.shape[1]))
    for low in range(0, len(Wt), columns.span):
        batch = slice(low, min(low + columns.span, len(Wt)))
        E = chosen.E[batch]
        if low:
            add_product(E, U[..., :low, batch].mT, chosen.E[:low])  # Σ E_k U_kj over all earlier batches
        within = U if columns.whole else U[..., batch, batch].contiguous()
        given = Wt[batch], within, D[..., batch]
        params = fixed[low // grid.group_size : batch.stop // grid.group_size]
        changed = E, codes[batch], chosen.lost
        if replays:
            chosen.params += replays(columns.solve, ("sweep", grid), changed, given, params)
        else:
            chosen.params += columns.solve(*changed, *given, params)
    return chosen
