"""fp8: e4m3 floats (arXiv:2209.05433) with a scale per row, block or group, for weights and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quantkit.errors import USAGE, require
from quantkit.layouts import Layout, Width
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.floats import FloatQuantized, MxFp8
from quantkit.layouts.fp8 import Fp8Layout
from quantkit.layouts.mlx import MlxLayout
from quantkit.layouts.modelopt import ModelOptLayout
from quantkit.options import option
from quantkit.quantize.methods import Work, composing, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.float8 import Float8Grid
    from quantkit.quantize.methods import Override

SUMMARY = "FP8: 8 bit floats, weights and activations, for Hopper and Ada. Needs no calibration; seconds."
WORK = Work(0, 0, (5e-9, 30e-9))
COMPUTES = "fp8"  # what engines multiply in, see capacity/devices.py
VARIANTS = {"mxfp8": ({"format": "mxfp8"}, "fp8")}
LAYOUTS = {"fp8": ("compressed-tensors", "deepseek", "modelopt"), "mxfp8": ("compressed-tensors", "mlx")}
BLOCK = 128  # the only one that engines have kernels for


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit fp8`."""

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
    solver: str = composing.shared("solver", "rtn")
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
    act_order: Literal["none", "group"] = composing.shared("act_order")
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    target: str = composing.shared("target")
    transform: str = composing.shared("transform")
    layout: Literal["compressed-tensors", "deepseek", "mlx", "modelopt"] = option(
        "compressed-tensors",
        "Layout on disk: compressed-tensors loads in vLLM, SGLang and transformers; deepseek is "
        "DeepSeek-V3's own, in blocks of 128; modelopt is NVIDIA's, for TensorRT-LLM and vLLM, and with "
        "--static has one scale for a matrix; mlx is mlx-lm's, for mxfp8, and rounds no activations.",
    )


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `fp8-block`."""
    form = "-deepseek" if options.layout == "deepseek" else "-block" if options.block else ""
    form += f"-{options.layout}" if options.layout in ("mlx", "modelopt") else ""
    static = "-static" if options.static else ""
    cache = "-kv" if options.kv_cache else ""
    return f"{options.format}{form}{static}{cache}{composing.suffix(options)}"


def check(options: Options) -> None:
    """Raise QuantkitError if options are invalid for every model."""
    composing.check(options)
    what = f"--block {options.block}: no engine has kernels for such blocks"
    require(options.block in (0, BLOCK), what, f"choose {BLOCK}, or 0", USAGE)
    what = "--static gives all inputs of a linear one scale, blocks give 128 columns of a token one"
    hint = "leave out one of them; --static is for --layout compressed-tensors and modelopt"
    require(not (options.static and _block(options)), what, hint, USAGE)
    what, bare = f"--kv-cache: --layout {options.layout} has no place for it", ("deepseek", "mlx")
    require(not options.kv_cache or options.layout not in bare, what, "choose another --layout", USAGE)
    what, fits = f"--layout {options.layout} does not hold {options.format}", LAYOUTS[options.format]
    require(options.layout in fits, what, f"choose --layout {' or '.join(fits)}", USAGE)
    other = options.format == "mxfp8" and (options.block or options.static or options.search_scale)
    hint = "leave out --block, --static and --search-scale"
    require(not other, "mxfp8 has one scale for 32 values, by the largest of them", hint, USAGE)


def _block(options: Options) -> int | None:
    return BLOCK if options.block or options.layout == "deepseek" else None


def layout(options: Options) -> Layout:
    """Return the layout."""
    if options.layout == "mlx":
        return MlxLayout(8, MxFp8.GROUP, options.format)
    if options.layout == "deepseek":
        return Fp8Layout()
    kind = ModelOptLayout if options.layout == "modelopt" else CompressedTensorsLayout
    form = FloatQuantized(_block(options), options.static, options.static and kind is ModelOptLayout)
    return kind(MxFp8() if options.format == "mxfp8" else form, cache=options.kv_cache)


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return bits and group size of a linear's grid."""
    refuse_override(override, f"{options.format} has one width")
    return Width(8, MxFp8.GROUP if options.format == "mxfp8" else _block(options) or in_features)


def grid(options: Options, width: Width, name: str) -> Float8Grid:
    """Return the grid of a linear."""
    from quantkit.grids.float8 import WHOLE, Float8Grid, MxFp8Grid

    if options.format == "mxfp8":
        return MxFp8Grid()
    scales = "bfloat16" if options.layout == "compressed-tensors" else "float32"
    search = options.search_scale or options.solver != "rtn"
    rows = WHOLE if options.static and options.layout == "modelopt" else _block(options) or 1
    return Float8Grid(width.group_size, rows, search, scales)
