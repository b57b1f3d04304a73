"""Embedding and head outside the loop: quantized before the first block, so that all blocks run with them."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.grids.distance import weight_error
from quantkit.grids.grid import Grid
from quantkit.layouts import Layout, LinearSpec
from quantkit.models.machine import distributed
from quantkit.models.skeleton import Skeleton
from quantkit.models.skeleton import rows as by_rows
from quantkit.models.skeleton.rows import Rows
from quantkit.quantize.calibrate.statistics import SiteStatistics
from quantkit.quantize.outputs import Material, MeasureHead
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import Solver
from quantkit.quantize.solvers.rtn import RtnSolver
from quantkit.quantize.solving import solve
from quantkit.quantize.staging.parts import BlockParts

FINE = 6  # bits: refinement takes half of the time, and the demo model's KL falls by 0.00001 (Q6_K), by 0.2 %
TIED = 1.0  # KL of a Q6_K embedding alone, demo model: 0.00033, with 0.01 0.00035, by ggml's encoder 0.00066


def pieces(weight: Tensor, specs: Iterable[LinearSpec]) -> Iterator[slice]:
    """Yield all rows of a matrix `[out, in]`, at a time as many weights as a block's largest linear has."""
    largest = max(spec.weights for spec in specs if not spec.embedding)
    step = max(1, largest // weight.shape[1])
    return (slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step))


def solved_rows(
    weight: Tensor,
    grid: Grid,
    layout: Layout,
    material: Material,
    solver: Solver,
    statistics: SiteStatistics,
    tied: bool,
) -> tuple[dict[str, Tensor], str | None]:
    """Return a matrix `[out, in]` in a layout whose tensors have one row per output, and the reason if error
    feedback was not used. The matrix is solved in `pieces`.

    tied: errors of the embedding count too, with equal weight for every column. Codes of FINE bits are not
    refined. Without a Hessian, weights are rounded to nearest.
    """
    if not statistics:
        solver = RtnSolver()
    elif tied or grid.bits >= FINE:
        fine = {"refine": 0} if grid.bits >= FINE else {}
        solver = replace(solver, **fine, **({"damp": TIED} if tied else {}))
    fallback, tensors = None, {}
    for rows in pieces(weight, material.specs):
        chunk = weight[rows].to(material.skeleton.device, torch.float32)
        (solved,) = solve(solver, [chunk], [grid], statistics)
        fallback = fallback or solved.fallback
        for name, part in layout.encode(solved.weight).items():
            if part.ndim and not rows.start:
                tensors[name] = part.new_empty(len(weight), *part.shape[1:], device="cpu")
            if part.ndim:
                tensors[name][rows] = part
    return tensors, fallback


def replace_parameter(skeleton: Skeleton, name: str, own: Collection[str], rows: Rows) -> None:
    """Replace the model's parameter `name` outside the blocks, and those tied to it, except `own`."""
    tied = skeleton.model.all_tied_weights_keys.items()
    twins = {a for pair in tied if name in pair for a in pair} - {*own}
    by_rows.install(skeleton.model, {name, *twins}, rows, skeleton.device)


def install_embedding(
    spec: LinearSpec, material: Material, solver: Solver, measure_head: MeasureHead, progress: Progress
) -> None:
    """Quantize, install and stage the embedding. Weights are rounded to nearest, except those of an embedding
    that is the head as well: if `solver` uses second moments, these are solved by them."""
    skeleton, staging, layout = material.skeleton, material.staging, material.layout.at(spec.name)
    name, weight = f"{spec.local}.weight", None
    if distributed.broadcast(lambda: staging.is_done(spec.block)):
        stored = distributed.broadcast(lambda: staging.read(spec.block))
        packed = {part.removeprefix(f"{spec.name}."): tensor for part, tensor in stored.items()}
    else:
        weight, statistics = material.checkpoint.read(f"{spec.name}.weight"), SiteStatistics()
        tied = any(name in pair for pair in skeleton.model.all_tied_weights_keys.items())
        if tied and solver.feeds_back:
            progress.phase("measuring inputs of the head")
            statistics = measure_head()
        packed, fallback = solved_rows(weight, spec.grid, layout, material, solver, statistics, tied)
        del statistics

    def rows(part: slice) -> Tensor:
        return layout.values({name: tensor[part] for name, tensor in packed.items()}).to(skeleton.dtype)

    replace_parameter(skeleton, name, (), rows)
    if weight is not None:
        weight = weight.to(skeleton.dtype)
        error = weight_error(weight, torch.cat([rows(part) for part in by_rows.slices(weight)]))
        parts = BlockParts(staging, spec.block)
        parts.add_linear(spec.name, packed)
        record = {"name": spec.name, "error": error, "rtn_error": None, "fallback": fallback, "notes": []}
        parts.finish([record | {"weight_error": error}])
        staging.wait()
