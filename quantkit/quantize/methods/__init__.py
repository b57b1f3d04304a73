"""Methods, picked by name. A method is a preset of solver, grid and layout; one file each.

A method's file holds
SUMMARY  a line for the help. WORK: its cost in time and memory with default options.
Options  a frozen dataclass whose fields become flags. `check(options)` raises QuantkitError for options that
         are invalid for every model (default: `composing.check`). `suffix(options)` ends derived names.
layout   `layout(options)` and `width(options, in_features, override)`: how a linear is stored; or, if that
         depends on the whole model, `stored_as(options)`: the name of a format of `quantkit plan`.
grid     `grid(options, width, name)`: the grid of the linear stored as `name`.
COMPUTES the type in which engines multiply, a name of `capacity/devices.py`; default: 16 bit.
record   optional `record(options)`: options in the fingerprint that replace the values typed, such as paths.
VARIANTS optional further formats for plans: name -> (options, type in which engines multiply).
build    optional `build(options, calibrated, skeleton)`: the method, if `compose` does not suffice.
         calibrated: the user gave calibration text. skeleton: the model, for methods whose choice depends
         on all of its tensors.
torch is imported inside `grid` and `build`, so that `--help` stays fast and plans do not need it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError, compiled, one_of, require

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.grids.grid import Grid
    from quantkit.layouts import Layout, Statistic, Width
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.outputs.folder import Output
    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.scaling import ColumnScaling


@dataclass(frozen=True)
class Override:
    """`REGEX=bits[,group_size]`: another grid for linears whose names match."""

    text: str
    pattern: re.Pattern
    bits: int
    group_size: int | None = None

    @property
    def flag(self) -> str:
        """Return the flag as typed, for messages."""
        return f"--override {self.text}"


USUAL = 4096  # width of a linear that every layout can hold
SMALL = 1 / 20  # share of weights below which linears do not decide about others, and may stay in 16 bit
ESCAPE = r"escape dots and parentheses, as in 'layers\.0\.'"
GROUP_SIZES = (128, 64, 32)  # to choose from without --group-size; all clients have kernels for them
MakeGrid = Callable[[str, int, int, "Override | None"], "Grid | None"]


def parse_override(text: str) -> Override:
    """Parse `REGEX=bits[,group_size]`. Raises QuantkitError if malformed."""
    parts = re.fullmatch(r"(.+)=(\d+)(?:,(-?\d+))?", text)
    what = f"--override {text!r} is not REGEX=bits or REGEX=bits,group_size"
    require(parts, what, r"for example --override 'layers\.0\.=8' or --override 'down_proj$=4,32'", USAGE)
    pattern, bits, group_size = parts.groups()
    found = compiled(pattern, f"--override {pattern!r}", ESCAPE)
    return Override(text, found, int(bits), None if group_size is None else int(group_size))


def _folder() -> Output:
    from quantkit.quantize.outputs.folder import Output

    return Output()


@dataclass(frozen=True)
class Method:
    """make_grid: `make_grid(name, out_features, in_features, override)` returns the grid of linear `name`.

    notes: warnings to show before the job runs. outside: embedding and head are encoded before the first
    block.
    """

    name: str
    solver: Solver
    layout: Layout
    make_grid: MakeGrid
    transform: ColumnScaling | None = None
    output: Output = field(default_factory=_folder)
    notes: tuple[str, ...] = ()
    outside: bool = False

    @property
    def needs(self) -> frozenset[Statistic]:
        """Return the statistics of calibration text that the method needs; an empty set if data-free."""
        parts = (self.solver, self.output, self.transform, self.layout)
        return frozenset().union(*(part.needs for part in parts if part))


@dataclass(frozen=True)
class Work:
    """Cost of a method besides running blocks.

    forwards: passes of all tokens through a block; 0 without calibration. products: operations per linear, in
    `out · in²`. seconds: per weight and core, everything but matrix products (fast and slow). h200_seconds:
    per billion parameters, a dense block and a layer of experts (docs/gpu.md). transform: a transform needs
    statistics of all sites first. sample: share of the tokens that it uses, if not all. outside: embedding
    and head are encoded too; the head needs another pass of all tokens through the blocks.
    """

    forwards: float
    products: float
    seconds: tuple[float, float]
    h200_seconds: tuple[float, float] | None = None
    transform: bool = False
    sample: float = 0.0
    outside: bool = False


def available() -> list[str]:
    """Return the names of the methods: the files of this package except composing.py."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "composing")


def load(name: str) -> ModuleType:
    """Import a method's module. For an unknown name, the QuantkitError lists similar ones."""
    one_of(name, available(), f"no method {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def summary(name: str) -> str:
    """Return a method's SUMMARY, read from its source: importing all methods would slow the help."""
    source = Path(find_spec(f"{__name__}.{name}").origin).read_text(encoding="utf-8")
    line = re.search(r'^SUMMARY = "([^"\\]*)"$', source, re.MULTILINE)
    return line[1] if line else load(name).SUMMARY


def check(name: str, options: Any) -> None:
    """Raise QuantkitError if a method's options are invalid for every model."""
    from quantkit.quantize.methods import composing

    getattr(load(name), "check", composing.check)(options)


def record(name: str, options: Any) -> dict:
    """Return options as a fingerprint has them when it is read again."""
    module = load(name)
    found = json.loads(json.dumps(asdict(options)))
    return found | (module.record(options) if hasattr(module, "record") else {})


def build(name: str, options: Any, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Return the method for these options. calibrated, skeleton: see the module."""
    module = load(name)
    if hasattr(module, "build"):
        return module.build(options, calibrated, skeleton)
    return compose(name, options, skeleton)


def compose(
    name: str,
    options: Any,
    skeleton: Skeleton | None = None,
    weighted: bool = False,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Method:
    """Return a method with its own layout and grid, and the solver and transform in its options. weighted:
    see `composing.solver`; rounded: see `composing.block_transform`."""
    from quantkit.quantize.methods import composing

    module = load(name)
    layout, dtype = module.layout(options), skeleton.checkpoint.config.dtype if skeleton else None

    def make_grid(stored: str, out_features: int, in_features: int, override: Override | None) -> Grid:
        found = module.grid(options, module.width(options, in_features, override), stored)
        return layout.grid(found, dtype)

    solver = composing.solver(options, getattr(options, "act_order", "group"), weighted)
    transform = composing.block_transform(getattr(options, "transform", "none"), solver, rounded)
    notes = module.notes(options) if hasattr(module, "notes") else ()
    return Method(name, solver, layout, make_grid, transform, notes=notes)


def each(name: str, options: Any, output: Path | None, model: str) -> list[tuple[Any, Path | None]]:
    """Return options and output path of every job of one command: one job, unless the method has `each`.

    model: the beginning of derived names.
    """
    module = load(name)
    return module.each(options, output, model) if hasattr(module, "each") else [(options, output)]


def has_open_groups(options: Any) -> bool:
    """Return whether a method has groups, and the user left their size open."""
    return getattr(options, "group_size", 0) is None


def with_groups(options: Any, linears: Iterable[tuple[int, int]]) -> Any:
    """Return options with the largest of GROUP_SIZES that divides the width of all linears, except widths
    that none divides, and widths with a small share of the weights. linears: (in_features, weights)."""
    widths: Counter[int] = Counter()
    for width, weights in linears:
        widths[width] += weights
    counted = [width for width in widths if widths[width] >= SMALL * widths.total()]
    counted = [width for width in counted if width % GROUP_SIZES[-1] == 0]
    size = next(size for size in GROUP_SIZES if not any(width % size for width in counted))
    return replace(options, group_size=size)


def check_grid(bits: int, group_size: int | None, where: str = "") -> None:
    """Raise QuantkitError for bits or group sizes that no layout has. where: the flag that set them, if not
    --bits or --group-size. group_size: None if it is still open."""
    require(2 <= bits <= 8, f"{where or f'--bits {bits}'}: no such width", "choose 2 to 8 bits", USAGE)
    what = f"{where or f'--group-size {group_size}'} is invalid"
    fits = group_size in (None, -1) or group_size >= 8
    require(fits, what, "choose groups of -1, 16, 32, 64 or 128", USAGE)


def check_layout(layout_of: Callable[[Any], Layout], options: Any) -> None:
    """Raise QuantkitError for bits and groups that the layout cannot hold in any linear, and for bits of head
    or embedding that no client of the layout reads."""
    from quantkit.layouts import Width, spec_of_shape

    options = with_groups(options, ()) if has_open_groups(options) else options
    layout, size = layout_of(options), options.group_size
    found = {name: bits for name in ("head", "embedding") if (bits := getattr(options, name))}
    for name, bits in {"bits": options.bits, **found}.items():
        check_grid(bits, size, "" if name == "bits" else f"--{name} {bits}")
        spec = spec_of_shape(USUAL, USUAL, Width(bits, USUAL if size == -1 else size, options.sym))
        reason = layout.check(spec)
        require(
            not reason,
            f"--layout {options.layout}: {reason}",
            "choose bits and groups that it has",
            UNSUPPORTED,
        )
    for name in sorted(found.keys() - layout.outside):
        what = f"--{name} {found[name]}: clients of --layout {options.layout} read no packed {name}"
        raise QuantkitError(what, f"leave out --{name}, or use --layout mlx or quantkit gguf", UNSUPPORTED)


def affine_width(
    override: Override | None, bits: int, group_size: int, in_features: int, symmetric: bool
) -> Width:
    """Return bits and group size of a linear's affine grid, from its override or else the method. Raises
    QuantkitError if no layout has them."""
    from quantkit.layouts import Width

    if override:
        bits = override.bits
        group_size = group_size if override.group_size is None else override.group_size
        check_grid(bits, group_size, override.flag)
    return Width(bits, in_features if group_size == -1 else group_size, symmetric)


def refuse_override(override: Override | None, reason: str) -> None:
    """Raise QuantkitError with `reason` if there is an override."""
    if override:
        what = f"{override.flag}: {reason}"
        raise QuantkitError(what, "keep linears in 16 bit with --exclude instead", UNSUPPORTED)
