"""awq: activation-aware scaling and clipping (arXiv:2306.00978) on affine grids, in three layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.layouts import Layout, Width
from quantkit.layouts.awq import AwqLayout
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.mlx import MlxLayout
from quantkit.options import option
from quantkit.quantize.methods import (
    Method,
    Work,
    affine_width,
    check_grid,
    check_layout,
    compose,
    composing,
)

if TYPE_CHECKING:
    from quantkit.grids.affine import AffineGrid
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods import Override

SUMMARY = "AWQ: 4 bit integers or others; columns that meet large activations are scaled up first."
WORK = Work(2, 25, (0.3e-6, 1.2e-6), (6, 12), True)
# Clipping q and k is left out (AWQ, section 3.2): what counts is their product, not their outputs.
UNCLIPPED = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "wq")


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit awq`."""

    bits: int = option(4, "Bits per weight, 2 to 8; the awq layout holds 4.")
    group_size: int | None = option(None, composing.GROUP_SIZE)
    sym: bool = option(False, "Symmetric grid: no zero point for each group.", negated=True)
    candidates: int = option(
        20, "Number of strengths of scaling, from none to full, that are tried for each site."
    )
    search_scale: bool = option(
        True,
        "rtn: search the scale of each group, except of q and k, for the least squared error of the outputs. "
        "--no-search-scale fits the largest weight.",
    )
    solver: str = composing.shared("solver", "rtn")
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    target: str = composing.shared("target")
    head: int = composing.shared("head")
    embedding: int = composing.shared("embedding")
    layout: Literal["awq", "compressed-tensors", "mlx"] = option("awq", composing.LAYOUTS.format("awq"))


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `awq-w4g128`."""
    group = "channel" if options.group_size == -1 else f"g{options.group_size}"
    solver = composing.suffix(options, "solver")
    return (
        f"awq{solver}-w{options.bits}{group}"
        + ("-sym" if options.sym and options.layout != "mlx" else "")
        + composing.outside(options)
        + ("-mlx" if options.layout == "mlx" else "")
    )


def check(options: Options) -> None:
    """Raise QuantkitError if options are invalid for every model."""
    check_grid(options.bits, options.group_size)
    if options.bits != 4 and options.layout == "awq":
        hint = "add --layout compressed-tensors, which holds 2 to 8, or --layout mlx"
        raise QuantkitError(f"the awq layout holds 4 bit, not --bits {options.bits}", hint, USAGE)
    check_layout(layout, options)
    what = f"--candidates {options.candidates} leaves nothing to search"
    require(options.candidates >= 2, what, "choose 2 or more", USAGE)
    composing.check(options)


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return bits and group size of a linear's grid. Raises QuantkitError if no grid has them."""
    return affine_width(override, options.bits, options.group_size, in_features, options.sym)


def grid(options: Options, width: Width, name: str) -> AffineGrid:
    """Return the grid of a linear."""
    from quantkit.grids.affine import AffineGrid

    feedback = options.solver != "rtn"
    clip = options.search_scale and not feedback and not name.rpartition(".")[2].startswith(UNCLIPPED)
    return AffineGrid(width.bits, width.group_size, width.symmetric, search=feedback, clip=clip)


def build(options: Options, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Return the method."""
    from quantkit.quantize.transforms.awq import AwqScaling

    return replace(compose("awq", options, skeleton, weighted=True), transform=AwqScaling(options.candidates))


def layout(options: Options) -> Layout:
    """Return the layout."""
    if options.layout == "awq":
        return AwqLayout(options.group_size, not options.sym)
    if options.layout == "mlx":
        return MlxLayout(options.bits, options.group_size)
    return CompressedTensorsLayout(PackQuantized(options.bits, options.group_size, options.sym))
