"""llama.cpp: each tensor of a GGUF file in any block type of ggml, with embedding and output matrix."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.auto.curve import Errors
from quantkit.auto.scaling import exchanged
from quantkit.auto.units import Candidate, Choice, Preset, Unit
from quantkit.grids.ggml import TYPES, named
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec
from quantkit.layouts.ggml.blocks import decode_rows, encode_rows
from quantkit.models.gguf.file_types import BLOCKS, FILE_TYPES
from quantkit.models.gguf.mixtures import EMBEDDING, OUTPUT, nbytes, stays_float
from quantkit.quantize.calibrate.importance import of_head
from quantkit.quantize.job import Job
from quantkit.quantize.methods import gguf
from quantkit.quantize.outputs.gguf import TIED, solved_head
from quantkit.quantize.progress import Progress
from quantkit.quantize.solvers import loss, rtn


@dataclass(frozen=True)
class GgufSpace:
    """All choices for llama.cpp, as `engines.FolderSpace`. Experts of a projection are one tensor."""

    method = "gguf"
    options = gguf.Options()
    zero_points = False  # the types say which of them have a minimum

    def units(self, job: Job) -> list[Unit]:
        """Return a unit for each matrix that a block type can store, by its name in the file."""
        rows = {f"{row.name}.weight": row for row in job.specs if row.grid is not None}
        units = []
        for target in job.method.output.targets:
            members = tuple(rows[name] for name in target.stored if name in rows)
            outside = target.name in (EMBEDDING, OUTPUT)
            if target.part is None and not stays_float(target.name, target.shape) and (members or outside):
                fits = [name for name in TYPES if target.shape[-1] % BLOCKS[name][0] == 0]
                found = sorted(
                    (Candidate(name, nbytes(name, target.shape)) for name in fits),
                    key=lambda one: one.nbytes,
                )
                block, weights = (members[0].block if members else None), math.prod(target.shape)
                units += [Unit(target.name, block, members, weights, tuple(found))] if found else []
        return units

    def grid(self, row: LinearSpec, candidate: str) -> Grid:
        """Return the grid of ggml's type."""
        return named(candidate)

    def presets(self, units: Sequence[Unit], job: Job) -> list[Preset]:
        """Return llama-quantize's mixtures."""
        found, targets = [], job.method.output.targets
        for name in FILE_TYPES:
            types = {
                one.name: one.type for one in gguf.chosen_types(self.options, name, targets, job.skeleton)
            }
            choice = {unit.name: types[unit.name] for unit in units}
            if all(kind in TYPES for kind in choice.values()):
                found.append(Preset(name, choice, {"quant.type": (name,)}))
        return found

    def values(self, units: Sequence[Unit], choice: Choice) -> dict[str, Any]:
        """Return the recipe of a choice: a type for each tensor, and the file type of the commonest."""
        weights: Counter[str] = Counter()
        equal: dict[tuple[str, str], list[str]] = {}
        blocks = {unit.block for unit in units} - {None}
        for unit in units:
            weights[choice[unit.name]] += unit.weights
            block, _, leaf = unit.name.removeprefix("blk.").partition(".")
            key = (leaf, choice[unit.name]) if unit.block is not None else (unit.name, choice[unit.name])
            equal.setdefault(key, []).extend([block] if unit.block is not None else [])
        patterns = []
        for (leaf, kind), numbers in sorted(equal.items()):
            places = r"\d+" if len(numbers) == len(blocks) else f"({'|'.join(numbers)})"
            prefix = rf"blk\.{places}\." if numbers else ""
            patterns.append(f"^{prefix}{re.escape(leaf)}$={kind}")
        return {"quant.type": (_file_type(weights),), "quant.tensor_type": tuple(patterns)}


def _file_type(weights: Counter[str]) -> str:
    """Return a file type with the commonest type as base, or the nearest in size."""
    common = max(sorted(weights), key=weights.__getitem__)

    def bits(kind: str) -> float:
        return 8 * BLOCKS[kind][1] / BLOCKS[kind][0]

    return min(FILE_TYPES, key=lambda name: abs(bits(FILE_TYPES[name].base) - bits(common)))


def nearest(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Return a weight `[out, in]` rounded to nearest on a grid fitted by the Hessian."""
    return rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian)).values()


class GgufOutside:
    """Candidates of embedding and output matrix, kept in memory. The output matrix, tied or not, is solved by
    error feedback on its inputs in the original model."""

    def __init__(self, job: Job, batches: Sequence[Tensor]):
        self._job, self._batches, self._statistics = job, batches, None
        self._targets = {target.name: target for target in job.method.output.targets}
        self._values: dict[tuple[str, str], Tensor] = {}

    def solve(self, unit: Unit, wanted: Sequence[Candidate]) -> Errors:
        """Return the errors of a unit, and keep the wanted candidates for `replaced`."""
        job, target = self._job, self._targets[unit.name]
        head = target.name == (OUTPUT if OUTPUT in self._targets else EMBEDDING)
        if head and self._statistics is None:
            self._statistics = of_head(job.skeleton, self._batches)
        weight = target.read(job.skeleton.checkpoint).float()
        hessian = self._weighing(weight, head, target.name == EMBEDDING)
        scale, errors = max(loss(weight, hessian), 1e-30), Errors()
        for candidate in unit.candidates:
            near = nearest(weight, named(candidate.name), hessian)
            errors.nearest[candidate.name] = loss(near.sub_(weight), hessian) / scale
        for candidate in wanted:
            if head:
                material, solver = job.material, job.method.solver
                rows = solved_head(target, candidate.name, self._statistics, material, solver, Progress())
            else:
                rows = encode_rows(candidate.name, weight, None)
            values = decode_rows(candidate.name, rows, weight.shape[1])
            errors.solved[candidate.name] = loss(values - weight, hessian) / scale
            self._values[unit.name, candidate.name] = values.to(job.skeleton.device, job.skeleton.dtype)
        return errors

    def _weighing(self, weight: Tensor, head: bool, embeds: bool) -> Tensor:
        """Return the cost of errors as outputs, as embeddings (equal columns), or as both."""
        if not head:
            return torch.eye(weight.shape[1])
        hessian = self._statistics.hessian.cpu().clone()
        if embeds:
            hessian.diagonal().add_(TIED * hessian.diagonal().mean())
        return hessian

    def replaced(self, unit: Unit, candidate: Candidate) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the candidate."""
        model, target = self._job.skeleton.model, self._targets[unit.name]
        own = {name for other in self._targets.values() for name in other.parameters}
        (name,) = target.parameters
        twins = {a for pair in model.all_tied_weights_keys.items() if name in pair for a in pair} - own
        return exchanged(model, dict.fromkeys((name, *twins), self._values[unit.name, candidate.name]))
