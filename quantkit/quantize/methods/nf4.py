"""nf4: 4-bit NormalFloat in blocks of 64 (QLoRA, arXiv:2305.14314), the bitsandbytes layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quantkit.layouts import Width
from quantkit.layouts.bitsandbytes import BLOCK, Nf4Layout
from quantkit.options import option
from quantkit.quantize.methods import Work, composing, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.nf4 import Nf4Grid
    from quantkit.quantize.methods import Override

SUMMARY = "NF4: 4 bit NormalFloat, blocks of 64. In seconds by rounding, or better with --solver gptq."
WORK = Work(0, 0, (15e-9, 60e-9))


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit nf4`."""

    double_quant: bool = option(True, "Store the scales in 8 bits: 4.13 bits per weight instead of 4.5.")
    solver: str = composing.shared("solver", "rtn")
    act_order: Literal["none", "group"] = composing.shared("act_order")
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    transform: str = composing.shared("transform")
    target: str = composing.shared("target")


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `nf4-gptq`."""
    return "nf4" + composing.suffix(options) + ("" if options.double_quant else "-single")


def layout(options: Options) -> Nf4Layout:
    """Return the layout."""
    return Nf4Layout(options.double_quant)


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return bits and group size of a linear's grid."""
    refuse_override(override, "nf4 has one width")
    return Width(4, BLOCK)


def grid(options: Options, width: Width, name: str) -> Nf4Grid:
    """Return the grid of a linear."""
    from quantkit.grids.nf4 import Nf4Grid

    return Nf4Grid(options.double_quant)
