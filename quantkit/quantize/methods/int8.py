"""int8: row-wise int8 weights and activations, outlier columns in 16 bit (arXiv:2208.07339); bitsandbytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.layouts import Width
from quantkit.layouts.bitsandbytes import Int8Layout
from quantkit.options import check_value, option
from quantkit.quantize.methods import Method, Work, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.int8 import Int8Grid
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods import Override

SUMMARY = "LLM.int8: 8 bit weights and activations, outlier columns in 16 bit. Needs no calibration; seconds."
WORK = Work(0, 0, (12e-9, 50e-9))


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit int8`."""

    threshold: float = option(
        6.0,
        "Compute a column in 16 bit if its input reaches this value in any token; 0 for none. With "
        "--calibration, quantkit reports the number of such columns of each linear.",
    )


def suffix(options: Options) -> str:
    """Return the end of the derived output name."""
    return "int8"


def check(options: Options) -> None:
    """Raise QuantkitError if options are invalid for every model."""
    fits = 0 <= options.threshold < math.inf
    check_value("--threshold", options.threshold, fits, "choose 6, or 0 for none")


def layout(options: Options) -> Int8Layout:
    """Return the layout."""
    return Int8Layout(options.threshold)


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return 8 bits and one group per row."""
    refuse_override(override, "int8 has one width")
    return Width(8, in_features)


def build(options: Options, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Return the method. Calibration text is only used to count outlier columns; codes are the same."""
    from quantkit.grids.int8 import Int8Grid
    from quantkit.quantize.solvers.rtn import RtnSolver

    def make_grid(name: str, out_features: int, in_features: int, override: Override | None) -> Int8Grid:
        return Int8Grid(width(options, in_features, override).group_size)

    solver = RtnSolver(threshold=options.threshold if calibrated else None)
    return Method("int8", solver, layout(options), make_grid)
