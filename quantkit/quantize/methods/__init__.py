"""Methods: what a user picks by name. A method is a preset of solver, grid and layout; one file each.

A method's file holds `Options`, a frozen dataclass whose fields become the command's flags, and
`build(options, calibrated, skeleton)`; calibrated: the user gave calibration text; skeleton: the model to
be quantized, for methods whose choice depends on all of its tensors. It imports torch only inside
`build`, so that `--help` stays instant.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError

if TYPE_CHECKING:
    from quantkit.layouts import Layout
    from quantkit.quantize.linears import MakeGrid, Override
    from quantkit.quantize.outputs import Output
    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms import Transform


def _folder() -> Output:
    from quantkit.quantize.outputs.folder import FolderOutput

    return FolderOutput()


@dataclass(frozen=True)
class Method:
    """`make_grid(name, out_features, in_features, override)`: the grid of the linear stored as `name`.

    notes: what the user should know before the job runs.
    """

    name: str
    solver: Solver
    layout: Layout
    make_grid: MakeGrid
    transform: Transform | None = None
    output: Output = field(default_factory=_folder)
    notes: tuple[str, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """Which statistics of calibration text it works from; none for a data-free one."""
        parts = (self.solver, self.output, self.transform)
        return frozenset().union(*(part.needs for part in parts if part))


def available() -> list[str]:
    """Names of the methods, from the files of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The module of a method. Raises QuantkitError with the nearest names for an unknown one."""
    if name not in available():
        near = difflib.get_close_matches(name, available()) or available()
        raise QuantkitError(
            f"no method {name!r}", hint="did you mean " + " or ".join(near) + "?", exit_code=USAGE
        )
    return importlib.import_module(f"{__name__}.{name}")


def summary(name: str) -> str:
    """A method's SUMMARY, read off its source: the help lists all of them, and importing all takes longer
    than everything else it does.
    """
    source = pkgutil.get_data(__name__, f"{name}.py") or b""
    line = re.search(r'^SUMMARY = "([^"\\]*)"$', source.decode(), re.MULTILINE)
    return line[1] if line else load(name).SUMMARY


def each(name: str, options: Any, output: Path | None, model: str) -> list[tuple[Any, Path | None]]:
    """Options and output of every job that one command asks for; a method without `each` has one.

    model: what derived names begin with.
    """
    module = load(name)
    return module.each(options, output, model) if hasattr(module, "each") else [(options, output)]


def check_feedback(damp: float, refine: int) -> None:
    """Raise QuantkitError for options of error feedback that make no sense."""
    if refine < 0:
        raise QuantkitError(f"--refine {refine} makes no sense", "choose 0 or more", USAGE)
    if not 0 < damp < 1:
        raise QuantkitError(f"--damp {damp} is no share", "choose one between 0 and 1", USAGE)


def check_grid(bits: int, group_size: int, where: str = "") -> None:
    """Raise QuantkitError for an affine grid no layout has. `where`: the flag that asks for it, if it is
    neither --bits nor --group-size."""
    if bits not in (2, 3, 4, 8):
        raise QuantkitError(f"{where or f'--bits {bits}'}: no such width", "choose 2, 3, 4 or 8 bits", USAGE)
    if group_size != -1 and group_size < 8:
        raise QuantkitError(
            f"{where or f'--group-size {group_size}'} makes no sense",
            "choose groups of -1, 16, 32, 64 or 128",
            USAGE,
        )


def wanted(override: Override | None, bits: int, group_size: int) -> tuple[int, int]:
    """Bits and group size of a linear: what its override says, else the method's."""
    if override is None:
        return bits, group_size
    return override.bits, group_size if override.group_size is None else override.group_size


def refuse_override(override: Override | None, reason: str) -> None:
    """Raise QuantkitError if a linear is asked to differ from the others."""
    if override:
        raise QuantkitError(
            f"{override.flag}: {reason}", "keep linears in 16 bit with --exclude instead", UNSUPPORTED
        )
