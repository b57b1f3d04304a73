"""Units and candidates of each engine.

Folders of integers: each unit has its own bits and group size, by the layout's overrides. GGUF files: see
`gguf.py`. An engine restricts quantkit's formats to those of its kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.auto.gguf import GgufSpace
from quantkit.auto.units import Candidate, Choice, Preset, Unit
from quantkit.grids.grid import Grid
from quantkit.layouts import LinearSpec, fusions
from quantkit.layouts.compressed_tensors.integers import WIDTHS
from quantkit.quantize.job import Job
from quantkit.quantize.methods import gptq
from quantkit.quantize.prepare.linears import Override

EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class FolderSpace:
    """All choices for an engine.

    widths: bits of the engine's kernels; groups: group sizes, used if they divide the inputs; fuses: the
    engine fuses q/k/v and gate/up, which are stored equally. zero_points: the engine reads several widths
    with a zero point per group; symmetric: without zero points.
    """

    layout: str
    widths: tuple[int, ...]
    groups: tuple[int, ...] = (32, 64, 128)
    fuses: bool = True
    zero_points: bool = False
    symmetric: bool = True
    method = "gptq"

    @property
    def options(self) -> gptq.Options:
        """Return options of the job that lists the linears: the smallest groups fit most of them."""
        return gptq.Options(group_size=min(self.groups), layout=self.layout, sym=self.symmetric)

    def units(self, job: Job) -> list[Unit]:
        """Return one unit for each fused linear, with all bits and group sizes of the layout."""
        rows = [row for row in job.specs if row.grid is not None and row.block is not None]
        groups: dict[str, list[LinearSpec]] = {}
        fused = {row.name: name for name, members in fusions(rows).items() for row in members if self.fuses}
        for row in rows:
            expert = EXPERT.match(row.name)  # engines have one scheme for all experts of a layer
            groups.setdefault(expert[1] if expert else fused.get(row.name, row.name), []).append(row)
        return [self._unit(name, members, job) for name, members in groups.items()]

    def _unit(self, name: str, rows: Sequence[LinearSpec], job: Job) -> Unit:
        found = []
        for bits in self.widths:
            for group_size in self.groups:
                specs = [replace(row, grid=self.grid(row, f"{bits},{group_size}")) for row in rows]
                layout = job.method.layout
                if not any(spec.in_features % group_size or layout.check(spec) for spec in specs):
                    found.append(Candidate(f"{bits},{group_size}", sum(map(layout.nbytes, specs))))
        weights = sum(row.weights for row in rows)
        found.sort(key=lambda one: one.nbytes)
        return Unit(name, rows[0].block, tuple(rows), weights, tuple(found))

    def grid(self, row: LinearSpec, candidate: str) -> Grid:
        """Return the grid of a linear, by the name of a candidate."""
        bits, group_size = map(int, candidate.split(","))
        override = Override(candidate, re.compile(""), bits, group_size)
        return gptq.grid(self.options, gptq.width(self.options, row.in_features, override), row.name)

    def presets(self, units: Sequence[Unit], job: Job) -> list[Preset]:
        """Return choices with equal units, as `quantkit gptq --bits B --group-size G` makes."""
        names = set.intersection(*({one.name for one in unit.candidates} for unit in units))
        equal = {name: {unit.name: name for unit in units} for name in sorted(names)}
        return [Preset(_in_words(name), choice, self.values(units, choice)) for name, choice in equal.items()]

    def values(self, units: Sequence[Unit], choice: Choice) -> dict[str, Any]:
        """Return the recipe of a choice: the commonest candidate, and overrides for the others."""
        weights: Counter[str] = Counter()
        for unit in units:
            weights[choice[unit.name]] += unit.weights
        common = max(sorted(weights), key=weights.__getitem__)
        bits, group_size = map(int, common.split(","))
        overrides = tuple(
            f"{_pattern(unit)}={choice[unit.name]}" for unit in units if choice[unit.name] != common
        )
        values = {"quant.layout": self.layout, "quant.bits": bits, "quant.group_size": group_size}
        values |= {} if self.symmetric else {"quant.sym": False}
        return values | ({"run.override": overrides} if overrides else {})


def _in_words(name: str) -> str:
    bits, group_size = name.split(",")
    return f"{bits} bit g{group_size}"


def _pattern(unit: Unit) -> str:
    """Return a regular expression of a unit's linears, with any number for experts."""
    names = sorted({re.sub(r"experts\\\.\d+", r"experts\\.\\d+", re.escape(row.name)) for row in unit.rows})
    owners = {name.rpartition(".")[0] for name in names}
    if len(names) == 1:
        return f"^{names[0]}$"
    if len(owners) == 1:  # ends with the backslash of the last point
        return f"^{owners.pop()}.({'|'.join(name.rpartition('.')[2] for name in names)})$"
    return f"^({'|'.join(names)})$"


Space = FolderSpace | GgufSpace
ENGINES: dict[str, Space] = {
    "any": FolderSpace("gptq", (2, 3, 4, 8), zero_points=True),  # widths that most clients read
    "llama.cpp": GgufSpace(),
    "transformers": FolderSpace("compressed-tensors", tuple(WIDTHS), (32, 64, 128, 256), fuses=False),
    "vllm": FolderSpace("compressed-tensors", (4, 8)),  # widths of the fast kernels, Marlin and Machete
}
