"""fp8: e4m3 floats (arXiv:2209.05433) with a scale per row, block or group, for weights and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import USAGE, require
from quantkit.layouts import Layout, Width
from quantkit.layouts._late import float8
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.floats import FloatQuantized, MxFp8
from quantkit.layouts.fp8 import Fp8Layout
from quantkit.layouts.mlx import MlxLayout
from quantkit.layouts.modelopt import ModelOptLayout
from quantkit.options import option
from quantkit.quantize.methods import Method, MethodOptions, Work, _options

LAYOUTS = {"fp8": ("compressed-tensors", "deepseek", "modelopt"), "mxfp8": ("compressed-tensors", "mlx")}
BLOCK = 128  # the only one that engines have kernels for


@dataclass(frozen=True)
class Options(MethodOptions):
    format: str = option(
        "fp8",
        "fp8: scales of rows or --block. mxfp8: a power of two for 32 weights, and for 32 values of a token.",
        names=tuple(LAYOUTS),
    )
    block: int = option(
        0,
        "0: one scale for each row of weights and for each token. 128: one scale for each square of 128 rows "
        "and columns, and for each 128 values of a token.",
    )
    static: bool = option(
        False,
        "Store one scale for the inputs of each linear, measured on calibration text, instead of one scale "
        "for each token while running: faster in some engines, more loss.",
    )
    solver: str = _options.shared("solver", "rtn")
    search_scale: bool = option(
        False,
        "rtn: search each scale for the least squared error, in fifteen times the time, instead of fitting "
        "the largest weight. Other solvers always search.",
        negated=True,
    )
    kv_cache: bool = option(
        False,
        "Store scales of keys and values, measured on calibration text. Engines can then keep the KV cache "
        "in 8 bit floats.",
    )
    act_order: Literal["none", "group"] = _options.shared("act_order")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    target: str = _options.shared("target")
    transform: str = _options.shared("transform")
    layout: Literal["compressed-tensors", "deepseek", "mlx", "modelopt"] = option(
        "compressed-tensors",
        "Layout on disk: compressed-tensors loads in vLLM, SGLang and transformers; deepseek is "
        "DeepSeek-V3's own, in blocks of 128; modelopt is NVIDIA's, for TensorRT-LLM and vLLM, and with "
        "--static has one scale for a matrix; mlx is mlx-lm's, for mxfp8, and rounds no activations.",
    )


class Fp8(Method):
    """FP8: 8 bit floats, weights and activations, for Hopper and Ada. Needs no calibration; seconds."""

    Options = Options
    options: Options
    computes = "fp8"
    variants = {"mxfp8": ({"format": "mxfp8"}, "fp8")}
    work = Work(0.1, h200_seconds=4.4)

    @property
    def suffix(self) -> str:
        options = self.options
        form = "-deepseek" if options.layout == "deepseek" else "-block" if options.block else ""
        form += f"-{options.layout}" if options.layout in ("mlx", "modelopt") else ""
        static = "-static" if options.static else ""
        cache = "-kv" if options.kv_cache else ""
        return f"{options.format}{form}{static}{cache}{self.changed('solver', 'transform')}"

    @property
    def layout(self) -> Layout:
        options = self.options
        if options.layout == "mlx":
            return MlxLayout(8, MxFp8.GROUP, options.format)
        if options.layout == "deepseek":
            return Fp8Layout()
        kind = ModelOptLayout if options.layout == "modelopt" else CompressedTensorsLayout
        form = FloatQuantized(self._block, options.static, options.static and kind is ModelOptLayout)
        return kind(MxFp8() if options.format == "mxfp8" else form, cache=options.kv_cache)

    def check(self) -> None:
        super().check()
        options = self.options
        what = f"--block {options.block}: no engine has kernels for such blocks"
        require(options.block in (0, BLOCK), what, f"choose {BLOCK}, or 0", USAGE)
        what = "--static gives all inputs of a linear one scale, blocks give 128 columns of a token one"
        hint = "leave out one of them; --static is for --layout compressed-tensors and modelopt"
        require(not (options.static and self._block), what, hint, USAGE)
        what, bare = f"--kv-cache: --layout {options.layout} has no place for it", ("deepseek", "mlx")
        require(not options.kv_cache or options.layout not in bare, what, "choose another --layout", USAGE)
        what, fits = f"--layout {options.layout} does not hold {options.format}", LAYOUTS[options.format]
        require(options.layout in fits, what, f"choose --layout {' or '.join(fits)}", USAGE)
        other = options.format == "mxfp8" and (options.block or options.static or options.search_scale)
        hint = "leave out --block, --static and --search-scale"
        require(not other, "mxfp8 has one scale for 32 values, by the largest of them", hint, USAGE)

    @property
    def _block(self) -> int | None:
        return BLOCK if self.options.block or self.options.layout == "deepseek" else None

    def width(self, in_features: int) -> Width:
        group = MxFp8.GROUP if self.options.format == "mxfp8" else self._block
        return Width(8, group or in_features)

    def grid(self, width: Width, name: str) -> float8.Float8Grid:
        options = self.options
        if options.format == "mxfp8":
            return float8.MxFp8Grid()
        scales = "bfloat16" if options.layout == "compressed-tensors" else "float32"
        search = options.search_scale or options.solver != "rtn"
        rows = float8.WHOLE if options.static and options.layout == "modelopt" else self._block or 1
        return float8.Float8Grid(width.group_size, rows, search, scales)
