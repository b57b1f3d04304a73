"""Methods: what a user picks by name. A method is a preset of solver, grid and layout; one file each.

A method's file holds `Options`, a frozen dataclass whose fields become the command's flags, and
`build(options)`. It imports torch only inside `build`, so that `--help` stays instant.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from quantkit.errors import USAGE, QuantkitError

if TYPE_CHECKING:
    from quantkit.layouts import Layout
    from quantkit.solvers import Solver
    from quantkit.spec import MakeGrid
    from quantkit.transforms import Transform


@dataclass(frozen=True)
class Method:
    """`make_grid(out_features, in_features, override)` gives the grid of a linear of that shape."""

    name: str
    solver: Solver
    layout: Layout
    make_grid: MakeGrid
    transform: Transform | None = None


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
