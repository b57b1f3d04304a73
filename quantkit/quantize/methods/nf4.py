"""nf4: 4-bit NormalFloat in blocks of 64 (QLoRA, arXiv:2305.14314), the bitsandbytes layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.layouts import Width
from quantkit.layouts._late import nf4
from quantkit.layouts.bitsandbytes import BLOCK, Nf4Layout
from quantkit.options import option
from quantkit.quantize.methods import Method, MethodOptions, Work, _options


@dataclass(frozen=True)
class Options(MethodOptions):
    double_quant: bool = option(True, "Store the scales in 8 bits: 4.13 bits per weight instead of 4.5.")
    solver: str = _options.shared("solver", "rtn")
    act_order: Literal["none", "group"] = _options.shared("act_order")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    transform: str = _options.shared("transform")
    target: str = _options.shared("target")


class Nf4(Method):
    """NF4: 4 bit NormalFloat, blocks of 64. In seconds by rounding, or better with --solver gptq."""

    Options = Options
    options: Options
    work = Work(0.14, h200_seconds=3.6)

    @property
    def suffix(self) -> str:
        return "nf4" + self.changed("solver", "transform") + ("" if self.options.double_quant else "-single")

    @property
    def layout(self) -> Nf4Layout:
        return Nf4Layout(self.options.double_quant)

    def width(self, in_features: int) -> Width:
        return Width(4, BLOCK)

    def grid(self, width: Width, name: str) -> nf4.Nf4Grid:
        return nf4.Nf4Grid(self.options.double_quant)
