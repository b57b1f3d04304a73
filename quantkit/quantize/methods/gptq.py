"""gptq: affine integer grid, Hessian error feedback (arXiv:2210.17323), in three layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quantkit.errors import USAGE, QuantkitError, one_of, require
from quantkit.layouts import Layout, Width
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout
from quantkit.layouts.compressed_tensors.integers import PackQuantized
from quantkit.layouts.gptq import SPLIT, GptqLayout
from quantkit.layouts.mlx import MlxLayout
from quantkit.options import option
from quantkit.quantize.methods import Work, affine_width, check_layout, composing

if TYPE_CHECKING:
    from quantkit.grids.affine import AffineGrid
    from quantkit.quantize.methods import Override

VARIANTS = {
    "gptq-head8": ({"head": 8}, "16 bit"),
    "mlx": ({"layout": "mlx", "group_size": 64, "embedding": 8}, "16 bit"),
}
INPUTS = ("16bit", "fp8", "int8")
SUMMARY = "GPTQ: 2 to 8 bit integers chosen by Hessian error feedback on calibration text."
ALONE = "of 5 to 7 bits the gptq layout loads in GPTQModel alone, --layout compressed-tensors in transformers"
WORK = Work(1, 10, (0.3e-6, 1.2e-6), (8, 16), sample=1 / 8)


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit gptq`."""

    bits: int = option(4, "Bits per weight, 2 to 8. 4 and 8 run fastest; few clients run 5 to 7.")
    group_size: int | None = option(None, composing.GROUP_SIZE)
    sym: bool = option(
        True,
        "Symmetric grid, which some kernels need. --no-sym stores a zero point for each group: less loss.",
    )
    act_order: Literal["none", "group", "full"] = option(
        "group",
        "Order of columns. none: as stored. group: large inputs first inside each group; less loss, and the "
        "files look the same. full: large inputs first across groups (desc_act); slower, for fewer clients.",
    )
    search_scale: bool = option(
        True,
        "Search each group's scale for the least squared error. --no-search-scale fits the largest weight.",
    )
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    target: str = composing.shared("target")
    solver: str = composing.shared("solver")
    transform: str = composing.shared("transform")
    head: int = composing.shared("head")
    embedding: int = composing.shared("embedding")
    layout: Literal["gptq", "compressed-tensors", "mlx"] = option("gptq", composing.LAYOUTS.format("gptq"))
    activations: str = option(
        "16bit",
        "Type of the inputs of linears (W4A8), for --layout compressed-tensors. Not tried on a GPU.",
        names=INPUTS,
    )
    checkpoint_format: Literal["gptq", "gptq_v2"] = option(
        "gptq",
        "gptq: loads everywhere. gptq_v2: also stores zero points of 0, but old clients read it wrong.",
    )


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `gptq-w4g128`."""
    group = "channel" if options.group_size == -1 else f"g{options.group_size}"
    layout = {"gptq": "", "compressed-tensors": "-ct", "mlx": "-mlx"}[options.layout]
    grid = f"w{options.bits}{group}" + ("" if options.sym or options.layout == "mlx" else "-asym")
    head = composing.outside(options)
    head += f"-a-{options.activations}" if options.activations != "16bit" else ""
    return f"{options.solver}-{grid}{head}{composing.suffix(options, 'transform')}{layout}"


def check(options: Options) -> None:
    """Raise QuantkitError if options are invalid for every model."""
    check_layout(layout, options)
    composing.check(options)
    one_of(options.activations, INPUTS, f"--activations {options.activations}: no such type")
    if options.activations != "16bit" and options.layout != "compressed-tensors":
        what = f"--layout {options.layout} has no --activations {options.activations}"
        raise QuantkitError(what, "add --layout compressed-tensors", USAGE)
    if options.layout == "gptq":
        return
    only = f"--layout {options.layout} does not hold"
    if options.act_order == "full":
        raise QuantkitError(f"{only} --act-order full", "use --act-order group, or --layout gptq", USAGE)
    what = f"{only} --checkpoint-format {options.checkpoint_format}"
    hint = "leave it out: zero points of 0 are no trouble there; or use --layout gptq"
    require(options.checkpoint_format == "gptq", what, hint, USAGE)


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return bits and group size of a linear's grid. Raises QuantkitError if no grid has them."""
    return affine_width(override, options.bits, options.group_size, in_features, options.sym)


def grid(options: Options, width: Width, name: str) -> AffineGrid:
    """Return the grid of a linear."""
    from quantkit.grids.affine import AffineGrid

    zero_min = getattr(layout(options), "zero_min", 0)
    return AffineGrid(width.bits, width.group_size, width.symmetric, zero_min, options.search_scale)


def notes(options: Options) -> tuple[str, ...]:
    """Return warnings to show before the job runs."""
    return (ALONE,) if options.layout == "gptq" and options.bits in SPLIT else ()


def layout(options: Options) -> Layout:
    """Return the layout."""
    if options.layout == "mlx":
        return MlxLayout(options.bits, options.group_size)
    if options.layout == "compressed-tensors":
        inputs = options.activations.removesuffix("16bit")
        return CompressedTensorsLayout(PackQuantized(options.bits, options.group_size, options.sym, inputs))
    return GptqLayout(
        bits=options.bits,
        group_size=options.group_size,
        symmetric=options.sym,
        desc_act=options.solver != "rtn" and options.act_order == "full",
        damp_percent=options.damp,
        version=3 if options.bits in SPLIT else 1 if options.checkpoint_format == "gptq" else 2,
    )
