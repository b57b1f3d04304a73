"""An experiment: GPTQ's sweep and refinement, a group captured as a CUDA graph and replayed for all others.

quantkit does not use this. `plugged()` lets `GptqSolver` use it, `scripts/gpu_day` measures it. A captured
group computes on fixed tensors, so what it needs is copied in and what it chose is copied out: about ten
launches for a group of 128 columns instead of a thousand. On other devices than CUDA the same function is
called instead of replayed, which proves the copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quantkit.grids.grid import Grid
from quantkit.quantize.solvers import gptq
from quantkit.quantize.solvers.columns import Chosen, Columns
from quantkit.quantize.solvers.refine import _Visit

WARM_UP = 2  # calls before the capture, which fill caches of constants and load kernels


class Captured:
    """A function without arguments whose tensors stay where they are."""

    def __init__(self, function: Callable[[], Any], device: torch.device):
        self.function, self.graph, self.result = function, None, None
        if device.type != "cuda":
            return
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                function()
        here.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = function()

    def __call__(self) -> Any:
        """Run it again; what it returned last time is overwritten."""
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.result


def copied(params: Any) -> Any:
    """Return parameters of a group in memory of their own."""
    return type(params)(*(getattr(params, part.name).clone() for part in dataclasses.fields(params)))


class GroupSweep:
    """The sweep of one group of `[group_size, rows]`, errors of earlier groups given."""

    def __init__(self, rows: int, grid: Grid, like: Tensor):
        size = grid.group_size
        self.grid = grid
        self.Wt, self.E = like.new_ones(2, size, rows)
        self.U, self.D = torch.eye(size, device=like.device), like.new_ones(size)
        self.lost = like.new_zeros(rows)
        self.run = Captured(self._solve, like.device)

    def _solve(self) -> Chosen:
        columns = Columns(self.Wt, self.U, self.D, self.grid)
        chosen = columns.chosen
        chosen.E, chosen.lost = self.E, self.lost
        identity = torch.eye(len(self.U), device=self.U.device)
        inverse = torch.linalg.solve_triangular(self.U, identity, upper=True, unitriangular=True)
        params = self.grid.fit(torch.addmm(self.Wt, inverse.t(), self.E).t(), self.D)
        columns.choose(slice(0, len(self.Wt)), params, refit=True)
        return chosen


class PairVisit:
    """One visit of one or two groups by the refinement, `[groups * group_size, rows]`."""

    def __init__(self, params: list, rows: int, grid: Grid, like: Tensor):
        size = len(params) * grid.group_size
        self.grid, self.params = grid, [copied(each) for each in params]
        self.Wt, self.E, self.residual = like.new_zeros(3, size, rows)
        self.codes = torch.zeros(size, rows, dtype=torch.uint8, device=like.device)
        self.hessian, self.curvature = torch.eye(size, device=like.device), like.new_ones(size)
        self.lost = like.new_zeros(rows)
        self.run = Captured(self._improve, like.device)

    def _improve(self) -> list:
        chosen = Chosen(self.codes, self.E, list(self.params), self.lost)
        groups = range(len(self.params))
        visit = _Visit(self.Wt, chosen, self.grid, self.hessian[None], self.curvature[None], groups)
        visit.residual.copy_(self.residual.view_as(visit.residual))
        visit.improve()
        return chosen.params


class Graphs:
    """`sweep` and `refine` of the solver; keeps what was captured for shapes that come again."""

    def __init__(self) -> None:
        self.kept: dict[tuple, Any] = {}

    def _for(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def sweep(self, Wt: Tensor, U: Tensor, D: Tensor, grid: Grid, fixed: list | None = None) -> Chosen:
        assert not fixed, "parameters that span the matrix are not captured"
        rows, size = Wt.shape[1], grid.group_size
        group = self._for(("sweep", rows, grid), lambda: GroupSweep(rows, grid, Wt))
        group.lost.zero_()
        codes = torch.empty(Wt.shape, dtype=torch.uint8, device=Wt.device)
        chosen = Chosen(codes, torch.zeros_like(Wt), [], group.lost)
        for start in range(0, len(Wt), size):
            span = slice(start, start + size)
            chosen.E[span].addmm_(U[:start, span].t(), chosen.E[:start])
            fixed_tensors = (group.Wt, group.U, group.D, group.E)
            for into, given in zip(
                fixed_tensors, (Wt[span], U[span, span], D[span], chosen.E[span]), strict=True
            ):
                into.copy_(given)
            found = group.run()
            chosen.codes[span], chosen.E[span] = found.codes, found.E
            chosen.params += [copied(params) for params in found.params]
        chosen.lost = group.lost.clone()
        return chosen

    def refine(self, Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, cycles: int) -> None:
        curvature = hessian.diagonal().clone()
        hessian.div_(curvature[:, None])
        pairs = (len(chosen.params) + 1) // 2
        for _ in range(cycles):
            for k in range(pairs):
                self._visit(Wt, chosen, grid, hessian, curvature, range(k, len(chosen.params), pairs))

    def _visit(
        self, Wt: Tensor, chosen: Chosen, grid: Grid, hessian: Tensor, curvature: Tensor, groups: range
    ) -> None:
        params = [chosen.params[k] for k in groups]
        key = ("visit", len(groups), Wt.shape[1], grid)
        visit = self._for(key, lambda: PairVisit(params, Wt.shape[1], grid, Wt))
        spans = [slice(k * grid.group_size, (k + 1) * grid.group_size) for k in groups]
        whole = {"Wt": Wt, "E": chosen.E, "codes": chosen.codes, "curvature": curvature}
        for name, tensor in whole.items():
            torch.cat([tensor[span] for span in spans], out=getattr(visit, name))
        rows = torch.cat([hessian[span] for span in spans])
        torch.mm(rows, chosen.E, out=visit.residual)
        torch.cat([rows[:, span] for span in spans], 1, out=visit.hessian)
        visit.lost.copy_(chosen.lost)
        for into, given in zip(visit.params, params, strict=True):
            for part in dataclasses.fields(given):
                getattr(into, part.name).copy_(getattr(given, part.name))
        found = visit.run()
        chosen.lost.copy_(visit.lost)
        size = grid.group_size
        for place, (k, span) in enumerate(zip(groups, spans, strict=True)):
            own = slice(place * size, (place + 1) * size)
            chosen.E[span], chosen.codes[span] = visit.E[own], visit.codes[own]
            chosen.params[k] = copied(found[place])


@contextmanager
def plugged() -> Iterator[Graphs]:
    """`GptqSolver` uses captured groups."""
    graphs = Graphs()
    with mock.patch.multiple(gptq, sweep=graphs.sweep, refine=graphs.refine):
        yield graphs
