"""int8: row-wise int8 weights and activations, outlier columns in 16 bit (arXiv:2208.07339); bitsandbytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.layouts import Width
from quantkit.layouts._late import int8
from quantkit.layouts.bitsandbytes import Int8Layout
from quantkit.options import check_value, option
from quantkit.quantize.methods import BuiltMethod, Method, MethodOptions, Work

if TYPE_CHECKING:
    from quantkit.models.skeleton import Skeleton


@dataclass(frozen=True)
class Options(MethodOptions):
    threshold: float = option(
        6.0,
        "Compute a column in 16 bit if its input reaches this value in any token; 0 for none. With "
        "--calibration, quantkit reports the number of such columns of each linear.",
    )


class Int8(Method):
    """LLM.int8: 8 bit weights and activations, outlier columns in 16 bit. Needs no calibration; seconds."""

    Options = Options
    options: Options
    suffix = "int8"
    work = Work(0.085)

    @property
    def layout(self) -> Int8Layout:
        return Int8Layout(self.options.threshold)

    def check(self) -> None:
        threshold = self.options.threshold
        check_value("--threshold", threshold, 0 <= threshold < math.inf, "choose 6, or 0 for none")

    def width(self, in_features: int) -> Width:
        return Width(8, in_features)

    def grid(self, width: Width, name: str) -> int8.Int8Grid:
        return int8.Int8Grid(width.group_size)

    def build(self, skeleton: Skeleton | None = None, calibrated: bool = False) -> BuiltMethod:
        """Return the parts of a job. Calibration text only counts outlier columns; codes are the same."""
        from quantkit.quantize.solvers.rtn import RtnSolver

        solver = RtnSolver(threshold=self.options.threshold if calibrated else None)
        return replace(super().build(skeleton), solver=solver)
