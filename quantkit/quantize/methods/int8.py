"""int8: row-wise int8 weights and activations with outlier columns apart (arXiv:2208.07339), bitsandbytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option
from quantkit.quantize.methods import Method, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.int8 import Int8Grid
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.linears import Override

SUMMARY = "LLM.int8: 8 bit weights and activations, outlier columns in 16 bit. Needs no calibration; seconds."


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit int8`."""

    threshold: float = option(
        6.0,
        "A column whose activations reach this in any token is computed in 16 bit; 0 for none. With "
        "--calibration the number of such columns is reported for every linear.",
    )


def suffix(options: Options) -> str:
    """Ending of the derived output name."""
    return "int8"


def check(options: Options) -> None:
    """Raise QuantkitError for options no model could be quantized with."""
    if not 0 <= options.threshold < math.inf:
        raise QuantkitError(f"--threshold {options.threshold:g} makes no sense", "choose 6, or 0", USAGE)


def build(options: Options, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Compose the method. Given calibration text, it counts outlier columns; codes do not depend on it."""
    from quantkit.grids.int8 import Int8Grid
    from quantkit.layouts.bitsandbytes import Int8Layout
    from quantkit.quantize.solvers.rtn import RtnSolver

    def make_grid(name: str, out_features: int, in_features: int, override: Override | None) -> Int8Grid:
        refuse_override(override, "int8 has one width")
        return Int8Grid(in_features)

    solver = RtnSolver(threshold=options.threshold if calibrated else None)
    return Method("int8", solver, Int8Layout(options.threshold), make_grid)
