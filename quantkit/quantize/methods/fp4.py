"""fp4: 4-bit floats in groups of 16 (NVFP4) or 32 (MXFP4), by error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import USAGE, require
from quantkit.layouts import Layout, Width
from quantkit.layouts._late import fp4 as grids
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.floats import MxFp4Packed, NvFp4Packed
from quantkit.layouts.mlx import MlxLayout
from quantkit.layouts.modelopt import ModelOptLayout
from quantkit.options import option
from quantkit.quantize.methods import Method, MethodOptions, Work, _options

FORMATS = {"nvfp4": NvFp4Packed, "mxfp4": MxFp4Packed}


@dataclass(frozen=True)
class Options(MethodOptions):
    format: str = option(
        "nvfp4",
        "nvfp4: a float8 scale for 16 weights, 4.5 bits per weight. mxfp4: a power of two for 32 weights, "
        "4.25 bits per weight, more loss.",
        names=tuple(FORMATS),
    )
    activations: bool = option(
        False,
        "Round the inputs of linears to 4 bits, too: more tokens per second in large batches, more loss.",
    )
    layout: Literal["compressed-tensors", "mlx", "modelopt"] = option(
        "compressed-tensors",
        "Layout on disk. compressed-tensors: transformers, vLLM. mlx: mlx-lm; nvfp4 then has no divisor, "
        "which costs precision. modelopt: NVIDIA's, for TensorRT-LLM and vLLM; nvfp4 only.",
    )
    search_scale: bool = option(
        True,
        "Search each group's scale for the least squared error. --no-search-scale fits the largest weight.",
    )
    solver: str = _options.shared("solver")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    transform: str = _options.shared("transform")
    target: str = _options.shared("target")


class Fp4(Method):
    """FP4: NVFP4 or MXFP4, the 4 bit floats that accelerators multiply; by error feedback."""

    Options = Options
    options: Options
    variants = {"fp4a4": ({"activations": True}, "fp4")}
    work = Work(2.2, search=5.0, sample=1 / 8, h200_seconds=10.6)

    @property
    def suffix(self) -> str:
        options = self.options
        layout = "" if options.layout == "compressed-tensors" else f"-{options.layout}"
        inputs = "a4" if options.activations else ""
        return options.format + inputs + self.changed("solver", "transform") + layout

    @property
    def layout(self) -> Layout:
        options, form = self.options, FORMATS[self.options.format]
        if options.layout == "mlx":
            return MlxLayout(4, form.GROUP, options.format)
        if options.layout == "modelopt":
            return ModelOptLayout(NvFp4Packed(options.activations))
        return CompressedTensorsLayout(form(options.activations))

    def check(self) -> None:
        super().check()
        options = self.options
        rounded = options.layout == "mlx" and options.activations
        require(not rounded, "--layout mlx stores no --activations", "leave one of them out", USAGE)
        fits = options.layout != "modelopt" or options.format == "nvfp4"
        hint = "leave out --format, or write --layout compressed-tensors"
        require(fits, f"--layout modelopt holds nvfp4, not {options.format}", hint, USAGE)

    def width(self, in_features: int) -> Width:
        return Width(4, FORMATS[self.options.format].GROUP)

    def grid(self, width: Width, name: str) -> grids.Fp4Grid:
        kind = {"nvfp4": grids.NvFp4Grid, "mxfp4": grids.MxFp4Grid}[self.options.format]
        return kind(search=self.options.search_scale)
