"""w8a8: int8 weights and int8 activations (SmoothQuant, arXiv:2211.10438), with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from quantkit.layouts import Layout, Width
from quantkit.layouts.compressed_tensors import CompressedTensorsLayout, schemes
from quantkit.layouts.compressed_tensors.integers import IntQuantized
from quantkit.options import option
from quantkit.quantize.methods import Method, Work, compose, composing, refuse_override

if TYPE_CHECKING:
    from quantkit.grids.affine import AffineGrid
    from quantkit.models.skeleton import Skeleton
    from quantkit.quantize.methods import Override

SUMMARY = "W8A8: 8 bit integers, weights and activations, smoothed into each other; Ampere, Turing, CPUs."
COMPUTES = "int8"  # see capacity/formats.py
WORK = Work(1, 10, (0.3e-6, 1.2e-6), (12, 24), sample=1 / 8)


@dataclass(frozen=True)
class Options:
    """Flags of `quantkit w8a8`."""

    transform: str = composing.shared("smoothing")
    solver: str = composing.shared("solver")
    search_scale: bool = option(
        True,
        "Search each row's scale for the least squared error. --no-search-scale fits the largest weight.",
    )
    act_order: Literal["none", "group"] = composing.shared("act_order")
    damp: float = composing.shared("damp")
    refine: int = composing.shared("refine")
    target: str = composing.shared("target")


def suffix(options: Options) -> str:
    """Return the end of the derived output name, such as `w8a8-rtn-none`."""
    return f"w8a8{composing.suffix(options)}"


def layout(options: Options) -> Layout:
    """Return the layout."""
    return CompressedTensorsLayout(IntQuantized())


def width(options: Options, in_features: int, override: Override | None = None) -> Width:
    """Return 8 bits and one group per row."""
    refuse_override(override, "w8a8 has one width")
    return Width(8, in_features)


def grid(options: Options, width: Width, name: str) -> AffineGrid:
    """Return the grid of a linear."""
    from quantkit.grids.affine import AffineGrid

    return AffineGrid(8, width.group_size, search=options.search_scale)


def build(options: Options, calibrated: bool = False, skeleton: Skeleton | None = None) -> Method:
    """Return the method. Its smoothing simulates how clients round inputs."""
    from quantkit.layouts.compressed_tensors.activations import rounded

    form = IntQuantized()
    inputs = schemes.numbers("activations", form.activations())
    return compose("w8a8", options, rounded=partial(rounded, numbers=inputs))
