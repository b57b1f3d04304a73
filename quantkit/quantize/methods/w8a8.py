"""w8a8: int8 weights and int8 activations (SmoothQuant, arXiv:2211.10438), with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from quantkit.layouts import Width
from quantkit.layouts._late import affine
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout, schemes
from quantkit.layouts.compressed_tensors.integers import IntQuantized
from quantkit.options import option
from quantkit.quantize.methods import Method, MethodOptions, Work, _options

if TYPE_CHECKING:
    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.smooth import SmoothScaling


@dataclass(frozen=True)
class Options(MethodOptions):
    transform: str = _options.shared("smoothing")
    solver: str = _options.shared("solver")
    search_scale: bool = option(
        True,
        "gptq, yaqa: search each row's scale for the least error of the outputs. --no-search-scale fits "
        "the largest weight, as --solver rtn does.",
    )
    act_order: Literal["none", "group"] = _options.shared("act_order")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    target: str = _options.shared("target")


class W8a8(Method):
    """W8A8: 8 bit integers, weights and activations, smoothed into each other; Ampere, Turing, CPUs."""

    Options = Options
    options: Options
    computes = "int8"
    work = Work(2.0, search=3.0, sample=1 / 8, whole_rows=True, h200_seconds=12.8)

    @property
    def suffix(self) -> str:
        return "w8a8" + self.changed("solver", "transform")

    @property
    def layout(self) -> CompressedTensorsLayout:
        return CompressedTensorsLayout(IntQuantized())

    def width(self, in_features: int) -> Width:
        return Width(8, in_features)

    def grid(self, width: Width, name: str) -> affine.AffineGrid:
        return affine.AffineGrid(8, width.group_size, search=self.options.search_scale)

    def transform(self, solver: Solver) -> SmoothScaling | None:
        """Return the smoothing of each block, which simulates how clients round inputs."""
        from quantkit.layouts.compressed_tensors.activations import rounded
        from quantkit.quantize.transforms.smooth import SmoothScaling

        numbers = schemes.numbers("activations", IntQuantized().activations())
        smooth = self.options.transform == "smooth"
        return SmoothScaling(solver, partial(rounded, numbers=numbers)) if smooth else None
