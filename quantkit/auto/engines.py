"""Units and candidates of each engine.

Folders of integers: each unit has its own bits and group size. GGUF files: each tensor, including embedding
and output matrix, has its own ggml type. Candidates are only formats for which the engine has kernels.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.auto.units import Choice, Preset, Unit
from quantkit.grids.ggml import TYPES, named
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec, Width, fusions
from quantkit.layouts.compressed_tensors.integers import WIDTHS
from quantkit.layouts.ggml.blocks import decode_rows, encode_rows
from quantkit.models.gguf import architectures
from quantkit.models.gguf.file_types import BLOCKS, FILE_TYPES, SCALED
from quantkit.models.gguf.mixtures import EMBEDDING, OUTPUT, SCALES, SCALING, nbytes, stays_float
from quantkit.quantize.calibrate.importance import of_head
from quantkit.quantize.job import Job
from quantkit.quantize.methods import gguf, gptq
from quantkit.quantize.outputs.outside import TIED, pieces, solved_rows
from quantkit.quantize.solvers import loss, rtn

FP8 = ("bfloat16", "fp8")  # vLLM's caches
Errors = dict[str, dict[str, float]]  # see `units.Row`
EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class FolderSpace:
    """The units and candidates of an engine that reads folders.

    widths: numbers of bits. groups: group sizes, used if they divide in_features. fuses: the engine fuses
    q/k/v and gate/up, which then need equal formats. zero_points: the engine can read several widths with
    zero points. symmetric: candidates have no zero points. caches: types of the KV cache.
    """

    layout: str
    widths: tuple[int, ...]
    groups: tuple[int, ...] = (32, 64, 128)
    fuses: bool = True
    zero_points: bool = False
    symmetric: bool = True
    caches: tuple[str, ...] = ("bfloat16",)

    @property
    def method(self) -> gptq.Gptq:
        """Return the method of the job that lists the linears; the smallest group size fits most of them."""
        options = gptq.Options(group_size=min(self.groups), layout=self.layout, sym=self.symmetric)
        return gptq.Gptq(options)

    def units(self, job: Job) -> list[Unit]:
        """Return a unit for each linear, group of fused linears, or layer of experts."""
        specs = [spec for spec in job.specs if spec.grid is not None and spec.block is not None]
        groups: dict[str, list[LinearSpec]] = {}
        fused_linears = fusions(specs) if self.fuses else {}
        fused = {spec.name: name for name, members in fused_linears.items() for spec in members}
        for spec in specs:
            expert = EXPERT.match(spec.name)  # engines have one scheme for all experts of a layer
            groups.setdefault(expert[1] if expert else fused.get(spec.name, spec.name), []).append(spec)
        return [self._unit(name, members, job) for name, members in groups.items()]

    def _unit(self, name: str, specs: Sequence[LinearSpec], job: Job) -> Unit:
        candidates, layout = {}, job.method.layout
        for bits in self.widths:
            for group_size in self.groups:
                name_of_grid = f"{bits},{group_size}"
                stored = [replace(spec, grid=self.grid(spec, name_of_grid)) for spec in specs]
                if not any(spec.in_features % group_size or layout.check(spec) for spec in stored):
                    candidates[name_of_grid] = sum(map(layout.nbytes, stored))
        weights = sum(spec.weights for spec in specs)
        return Unit(name, specs[0].block, tuple(specs), weights, _sorted(candidates))

    def grid(self, spec: LinearSpec, candidate: str) -> Grid:
        """Return the grid of a linear for a candidate's name, such as `3,128` (bits, group size)."""
        bits, group_size = map(int, candidate.split(","))
        return self.method.grid(Width(bits, group_size, self.symmetric), spec.name)

    def presets(self, units: Sequence[Unit], job: Job) -> list[Preset]:
        """Return the choices with one format for all units, as `quantkit gptq --bits B --group-size G`."""
        names = set.intersection(*(set(unit.candidates) for unit in units))
        equal = {name: {unit.name: name for unit in units} for name in sorted(names)}
        return [
            Preset("{} bit g{}".format(*name.split(",")), choice, self.values(units, choice))
            for name, choice in equal.items()
        ]

    def values(self, units: Sequence[Unit], choice: Choice) -> dict[str, Any]:
        """Return a choice's recipe by dotted keys: the most frequent candidate, and overrides for others."""
        common = _most_frequent(units, choice)
        bits, group_size = map(int, common.split(","))
        overrides = tuple(
            f"{_pattern(unit)}={choice[unit.name]}" for unit in units if choice[unit.name] != common
        )
        values = {"quant.layout": self.layout, "quant.bits": bits, "quant.group_size": group_size}
        values |= {} if self.symmetric else {"quant.sym": False}
        return values | ({"run.override": overrides} if overrides else {})


def _most_frequent(units: Sequence[Unit], choice: Choice) -> str:
    """Return the candidate that most weights are stored in."""
    weights: Counter[str] = Counter()
    for unit in units:
        weights[choice[unit.name]] += unit.weights
    return max(sorted(weights), key=weights.__getitem__)


def _sorted(candidates: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(candidates.items(), key=lambda candidate: candidate[1]))


def _pattern(unit: Unit) -> str:
    """Return a regular expression that matches a unit's linears; for experts, of any number."""
    names = sorted(
        {re.sub(r"experts\\\.\d+", r"experts\\.\\d+", re.escape(spec.name)) for spec in unit.specs}
    )
    owners = {name.rpartition(".")[0] for name in names}
    if len(names) == 1:
        return f"^{names[0]}$"
    if len(owners) == 1:  # ends with the backslash of the last point
        return f"^{owners.pop()}.({'|'.join(name.rpartition('.')[2] for name in names)})$"
    return f"^({'|'.join(names)})$"


@dataclass(frozen=True)
class GgufSpace:
    """The units and candidates of llama.cpp, like `FolderSpace`. All experts' up matrices are one tensor."""

    method = gguf.Gguf(gguf.Options())
    caches = ("float16", "q8_0", "q4_0")
    zero_points = False  # the types say which of them have a minimum

    def units(self, job: Job) -> list[Unit]:
        """Return a unit for each matrix that a quantized ggml type can store, named as in the file."""
        specs = {f"{spec.name}.weight": spec for spec in job.specs if spec.grid is not None}
        units, types = [], [name for name in TYPES if name not in _unscaled(job)]
        for target in job.method.output.targets:
            members = tuple(specs[name] for name in target.stored if name in specs)
            outside = target.name in (EMBEDDING, OUTPUT)
            if target.part is None and not stays_float(target.name, target.shape) and (members or outside):
                fits = [name for name in types if target.shape[-1] % BLOCKS[name][0] == 0]
                fits = [name for name in fits if name not in SCALED or SCALES.match(target.name)]
                candidates = _sorted({name: nbytes(name, target.shape) for name in fits})
                block, weights = (members[0].block if members else None), math.prod(target.shape)
                units += [Unit(target.name, block, members, weights, candidates)] if candidates else []
        return units

    def grid(self, spec: LinearSpec, candidate: str) -> Grid:
        """Return the grid of a ggml type such as `Q3_K`."""
        return named(candidate)

    def presets(self, units: Sequence[Unit], job: Job) -> list[Preset]:
        """Return the choices that llama-quantize makes for its file types."""
        presets, targets, unscaled = [], job.method.output.targets, _unscaled(job)
        for name in (name for name in FILE_TYPES if name not in unscaled):
            chosen = self.method.chosen_types(name, targets, job.skeleton)
            types = {tensor.name: tensor.type for tensor in chosen}
            choice = {unit.name: types[unit.name] for unit in units}
            if all(kind in TYPES for kind in choice.values()):
                presets.append(Preset(name, choice, {"quant.type": (name,)}))
        return presets

    def values(self, units: Sequence[Unit], choice: Choice) -> dict[str, Any]:
        """Return a choice's recipe by dotted keys: a type for each tensor, and a file type."""
        equal: dict[tuple[str, str], list[str]] = {}
        blocks = {unit.block for unit in units} - {None}
        for unit in units:
            block, _, leaf = unit.name.removeprefix("blk.").partition(".")
            key = (leaf, choice[unit.name]) if unit.block is not None else (unit.name, choice[unit.name])
            equal.setdefault(key, []).extend([block] if unit.block is not None else [])
        patterns = []
        for (leaf, kind), numbers in sorted(equal.items()):
            index = r"\d+" if len(numbers) == len(blocks) else f"({'|'.join(numbers)})"
            prefix = rf"blk\.{index}\." if numbers else ""
            patterns.append(f"^{prefix}{re.escape(leaf)}$={kind}")
        common = _bits(_most_frequent(units, choice))
        nearest = min(FILE_TYPES, key=lambda name: abs(_bits(FILE_TYPES[name].base) - common))
        return {"quant.type": (nearest,), "quant.tensor_type": tuple(patterns)}


def _unscaled(job: Job) -> set[str]:
    """Return the types, named like their file types, whose scales llama.cpp does not apply in this model."""
    return set() if architectures.of_config(job.checkpoint.text_config).name in SCALING else SCALED


def _bits(kind: str) -> float:
    """Return the bits per weight of a ggml type."""
    return 8 * BLOCKS[kind][1] / BLOCKS[kind][0]


def nearest(weight: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Return the weight `[out, in]` rounded to nearest, with scales fitted by the Hessian."""
    return rtn.nearest(weight, grid, rtn.fitted(weight, grid, hessian)).values()


def solved_outside(
    job: Job, batches: Sequence[Tensor], unit: Unit, chosen: str
) -> tuple[Errors, dict[str, Tensor], dict[str, Tensor]]:
    """Return the errors of embedding or output matrix, and its weight in the chosen candidate by its name in
    the model, once for embedding tokens and once for logits; {} where the model does not use this matrix. The
    output matrix is solved with error feedback on its inputs in the original model."""
    targets = {target.name: target for target in job.method.output.targets}
    target, embeds = targets[unit.name], unit.name == EMBEDDING
    head = unit.name == (OUTPUT if OUTPUT in targets else EMBEDDING)
    weight = target.read(job.skeleton.checkpoint)
    hessian, parts = torch.eye(weight.shape[1]), list(pieces(weight, job.specs))  # H of an embedding
    if head:
        statistics = of_head(job.skeleton, batches)
        hessian = statistics.hessian.cpu().clone()
        if embeds:
            hessian.diagonal().add_(TIED * hessian.diagonal().mean())

    def lost(values: Callable[[slice, Tensor], Tensor]) -> float:
        pairs = ((rows, weight[rows].float()) for rows in parts)
        return sum(loss(values(rows, part) - part, hessian) for rows, part in pairs)

    scale = max(lost(lambda rows, part: part * 0), 1e-30)
    errors: Errors = {"nearest": {}, "solved": {}}
    for candidate in unit.candidates:
        rounded = partial(nearest, grid=named(candidate), hessian=hessian)
        errors["nearest"][candidate] = lost(lambda rows, part, rounded=rounded: rounded(part)) / scale
    if head:
        material, solver, grid = job.material, job.method.solver, named(chosen)
        tensors, _ = solved_rows(weight, grid, material.layout, material, solver, statistics, embeds)
        encoded = tensors[material.layout.marker]
    else:
        encoded = encode_rows(chosen, weight, None)
    values = torch.empty(weight.shape, dtype=job.skeleton.dtype, device=job.skeleton.device)

    def decoded(rows: slice, part: Tensor) -> Tensor:
        exact = decode_rows(chosen, encoded[rows], part.shape[1])
        values[rows] = exact
        return exact

    errors["solved"][chosen] = lost(decoded) / scale
    (name,) = target.parameters
    solved = {name: values}
    return errors, solved if embeds else {}, solved if head else {}


Space = FolderSpace | GgufSpace
ENGINES: dict[str, Space] = {
    "any": FolderSpace("gptq", (2, 3, 4, 8), zero_points=True, caches=FP8),  # what most clients read
    "llama.cpp": GgufSpace(),
    "transformers": FolderSpace("compressed-tensors", tuple(WIDTHS), (32, 64, 128, 256), fuses=False),
    # vLLM 0.32 on a GPU: Marlin and Machete run 4 and 8 bits, Humming all. Tried: 4 bits on a CPU
    "vllm": FolderSpace("compressed-tensors", tuple(WIDTHS), caches=FP8),
}
