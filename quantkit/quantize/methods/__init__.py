"""Methods, picked by name: one file each, with one subclass of `Method` and its `Options`.

A method is a preset of solver, transform, grid, layout and output. torch is imported inside functions or by
`layouts/_late.py`, so that `--help` stays fast and plans do not need it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from quantkit.errors import USAGE, one_of, require

if TYPE_CHECKING:
    from quantkit.grids.grid import Grid
    from quantkit.layouts import Layout, Statistic, Width
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods._override import Override
    from quantkit.quantize.outputs.folder import Output
    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.scaling import ColumnScaling

SMALL = 1 / 20  # share of weights below which linears do not decide about others, and may stay in 16 bit
GROUP_SIZES = (128, 64, 32)  # to choose from without --group-size; all clients have kernels for them
NAMED = ("solver", "target", "format", "transform", "activations")  # `check` compares them with their names
MakeGrid = Callable[[str, int, "Override | None"], "Grid | None"]


def available() -> list[str]:
    """Return the names of the methods: the files of this package that do not begin with `_`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


def load(name: str) -> type[Method]:
    """Import a method's class: `nf4.py` has `Nf4`. Raises QuantkitError, which lists similar names."""
    one_of(name, available(), f"no method {name!r}")
    return vars(importlib.import_module(f"{__name__}.{name}"))[name.capitalize()]


def create(name: str, **options: Any) -> Method:
    """Return the method with its default options, changed by `options`."""
    method = load(name)
    return method(method.Options(**options))


def summary(name: str) -> str:
    """Return the docstring of a method's class, read from its source, so that the help imports no method."""
    source = Path(find_spec(f"{__name__}.{name}").origin).read_text(encoding="utf-8")
    line = re.search(r'^class \w+\(\w*Method\):\n    """(.+)"""$', source, re.MULTILINE)
    return line[1] if line else load(name).__doc__


@dataclass(frozen=True)
class Work:
    """Time and memory of a method with default options, for `quantkit plan` (capacity/duration.py).

    weight: time of choosing a weight's code / that of 4-bit error feedback on this machine. search: the same
    for each weight that a transform looks at, if it skips no block. products: matrix products of a transform,
    in `out · in²`. sample: share of the calibration tokens that a transform uses. 0: no calibration; below 1:
    error feedback after the transform. outside: embedding and head are encoded too. whole_rows: a group of
    the grid is a row. h200_seconds: per billion weights of the blocks (docs/gpu.md).
    """

    weight: float
    search: float = 0.0
    products: float = 0.0
    sample: float = 0.0
    outside: bool = False
    whole_rows: bool = False
    h200_seconds: float | None = None

    @property
    def feeds_back(self) -> bool:
        """Return whether the solver is error feedback with the original model as target."""
        return 0 < self.sample < 1


class MethodOptions:
    """Options that quantkit reads of every method, with their values in methods without the flag. A subclass
    is a frozen dataclass; its fields become flags and keys of recipes.

    group_size: None: the user left it open; 0: the method has no groups to choose. head, embedding: bits; 0:
    they stay in 16 bit.
    """

    solver: ClassVar[str] = "rtn"
    act_order: ClassVar[str] = "group"
    damp: ClassVar[float] = 0.05
    refine: ClassVar[int] = 2
    target: ClassVar[str] = "own"
    transform: ClassVar[str] = "none"
    format: ClassVar[str] = ""
    bits: ClassVar[int | None] = None
    group_size: ClassVar[int | None] = 0
    head: ClassVar[int] = 0
    embedding: ClassVar[int] = 0


@dataclass(frozen=True)
class Method(ABC):
    """A method with its options. The docstring of a subclass is its line in the help.

    work: cost in time and memory with default options. computes: type in which engines multiply, a name of
    `capacity/devices.py`. variants: further formats for plans: name -> (options, type in which engines
    multiply). unused: options of a run that make no sense for the method; most have one width.
    """

    options: MethodOptions

    Options: ClassVar[type[MethodOptions]]
    work: ClassVar[Work]
    computes: ClassVar[str] = "16 bit"
    variants: ClassVar[Mapping[str, tuple[dict[str, Any], str]]] = {}
    unused: ClassVar[tuple[str, ...]] = ("override",)

    @property
    def name(self) -> str:
        """The name by which users pick the method."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The end of derived output names, such as `gptq-w4g128`."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The layout that stores linears."""

    @property
    def stored_as(self) -> str:
        """The format of `quantkit plan` that the method writes."""
        return self.name

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings to show before the job runs."""
        return ()

    def check(self) -> None:
        """Raise QuantkitError if the options are invalid for every model."""
        from quantkit.options import check_value

        refine, damp = self.options.refine, self.options.damp
        check_value("--refine", refine, refine >= 0, "choose 0 or more")
        require(0 < damp < 1, f"--damp {damp} is no share", "choose one between 0 and 1", USAGE)
        for option in fields(self.options):
            if option.name in NAMED and (names := option.metadata["names"]):
                value = getattr(self.options, option.name)
                one_of(value, names, f"--{option.name} {value}: no such {option.name}")

    def record(self) -> dict[str, Any]:
        """Return the options as a fingerprint has them when it is read again."""
        return json.loads(json.dumps(asdict(self.options)))

    def each(self, output: Path | None, model: str) -> list[tuple[Method, Path | None]]:
        """Return method and output path of every job of a command. model: the beginning of derived names."""
        return [(self, output)]

    def width(self, in_features: int) -> Width:
        """Return bits and group size of a linear's grid."""
        raise NotImplementedError

    def overridden(self, in_features: int, override: Override) -> Width:
        """Return bits and group size of a linear with an override; QuantkitError if there is no such grid."""
        raise override.refused(f"{self.options.format or self.name} has one width")

    def grid(self, width: Width, name: str) -> Grid:
        """Return the grid of the linear stored as `name`."""
        raise NotImplementedError

    def solver(self) -> Solver:
        """Return the solver for `--solver`. After a column scaling, round to nearest weighs errors."""
        from quantkit.quantize.solvers.gptq import GptqSolver
        from quantkit.quantize.solvers.rtn import RtnSolver
        from quantkit.quantize.solvers.yaqa import YaqaSolver

        options = self.options
        if options.solver == "rtn":
            return RtnSolver(weighted=options.transform in ("awq", "smooth"))
        kind = {"gptq": GptqSolver, "yaqa": YaqaSolver}[options.solver]
        return kind(options.damp, options.act_order, options.refine, options.target)

    def transform(self, solver: Solver) -> ColumnScaling | None:
        """Return the transform of each block for `--transform`. With rtn, "auto" means none."""
        from quantkit.quantize.transforms.auto import FeedbackScaling
        from quantkit.quantize.transforms.awq import AwqScaling

        if self.options.transform == "auto" and self.options.solver != "rtn":
            return FeedbackScaling(solver)
        return AwqScaling() if self.options.transform == "awq" else None

    def build(self, skeleton: Skeleton | None = None, calibrated: bool = False) -> BuiltMethod:
        """Return the parts of a job. skeleton: the model, if there is one. calibrated: by the user's text."""
        from quantkit.quantize.outputs.folder import Output

        layout, dtype = self.layout, skeleton.checkpoint.config.dtype if skeleton else None

        def make_grid(name: str, in_features: int, override: Override | None) -> Grid:
            width = self.overridden(in_features, override) if override else self.width(in_features)
            return layout.grid(self.grid(width, name), dtype)

        solver = self.solver()
        return BuiltMethod(self.name, solver, layout, make_grid, self.transform(solver), Output(), self.notes)

    def with_groups(self, linears: Iterable[tuple[int, int]]) -> Method:
        """Return the method with the largest of GROUP_SIZES that divides the width of all linears, except
        widths that none divides, and widths with a small share of the weights. linears: (in_features,
        weights)."""
        widths: Counter[int] = Counter()
        for width, weights in linears:
            widths[width] += weights
        counted = [width for width in widths if widths[width] >= SMALL * widths.total()]
        counted = [width for width in counted if width % GROUP_SIZES[-1] == 0]
        size = next(size for size in GROUP_SIZES if not any(width % size for width in counted))
        return replace(self, options=replace(self.options, group_size=size))

    def changed(self, *names: str) -> str:
        """Return the part of `suffix` for options that differ from their defaults, such as `-gptq-awq`."""
        default = self.Options()
        values = ((getattr(self.options, name), getattr(default, name)) for name in names)
        return "".join(f"-{value}" for value, usual in values if value != usual)


@dataclass(frozen=True)
class BuiltMethod:
    """The parts of a job, made by `Method.build`.

    make_grid: `make_grid(name, in_features, override)` returns the grid of linear `name`; None if the output
    encodes its weight. notes: warnings to show before the job runs. outside: embedding and head are encoded
    before the first block.
    """

    name: str
    solver: Solver
    layout: Layout
    make_grid: MakeGrid
    transform: ColumnScaling | None
    output: Output
    notes: tuple[str, ...] = ()
    outside: bool = False

    @property
    def needs(self) -> frozenset[Statistic]:
        """Return the statistics of calibration text that the method needs; an empty set if data-free."""
        return self.solves_with | (self.transform.needs if self.transform else frozenset())

    @property
    def solves_with(self) -> frozenset[Statistic]:
        """Return the statistics that are needed after a transform."""
        return self.solver.needs | self.output.needs | self.layout.needs
