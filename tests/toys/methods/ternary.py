"""ternary: three values a weight, by rounding or by error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.layouts.trits import TritsLayout

from quantkit.layouts import Width
from quantkit.options import option
from quantkit.quantize.methods import Method, MethodOptions, Work


@dataclass(frozen=True)
class Options(MethodOptions):
    group_size: int = option(32, "Weights that share a scale.")
    solver: Literal["rtn", "gptq"] = option("rtn", "rtn rounds to nearest; gptq feeds errors back.")


class Ternary(Method):
    """Ternary: a toy of three values a weight."""

    Options = Options
    suffix = "ternary"
    work = Work(0.1)

    @property
    def layout(self) -> TritsLayout:
        return TritsLayout(self.options.group_size)

    def width(self, in_features: int) -> Width:
        return Width(2, self.options.group_size)

    def grid(self, width: Width, name: str):
        from quantkit.grids.ternary import TernaryGrid

        return TernaryGrid(width.group_size)
