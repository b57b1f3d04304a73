"""awq: activation-aware scaling and clipping (arXiv:2306.00978) on affine grids, in three layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from quantkit.errors import USAGE, require
from quantkit.layouts import Layout, Width
from quantkit.layouts._late import affine
from quantkit.layouts.awq import AwqLayout
from quantkit.options import option
from quantkit.quantize.methods import MethodOptions, Work, _options
from quantkit.quantize.methods._affine import AffineMethod

if TYPE_CHECKING:
    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.awq import AwqScaling

# Clipping q and k is left out (AWQ, section 3.2): what counts is their product, not their outputs.
UNCLIPPED = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "wq")


@dataclass(frozen=True)
class Options(MethodOptions):
    transform: ClassVar[str] = "awq"

    bits: int = option(4, "Bits per weight, 2 to 8; the awq layout holds 4.")
    group_size: int | None = option(None, _options.GROUP_SIZE)
    sym: bool = option(False, "Symmetric grid: no zero point for each group.", negated=True)
    candidates: int = option(
        20, "Number of strengths of scaling, from none to full, that are tried for each site."
    )
    search_scale: bool = option(
        True,
        "rtn: search the scale of each group, except of q and k, for the least squared error of the outputs. "
        "--no-search-scale fits the largest weight.",
    )
    solver: str = _options.shared("solver", "rtn")
    signed_scales: bool = _options.shared("signed_scales")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    target: str = _options.shared("target")
    head: int = _options.shared("head")
    embedding: int = _options.shared("embedding")
    layout: Literal["awq", "compressed-tensors", "mlx"] = option("awq", _options.LAYOUTS.format("awq"))


class Awq(AffineMethod):
    """AWQ: 4 bit integers or others; columns that meet large activations are scaled up first."""

    Options = Options
    options: Options
    work = Work(0.7, search=0.5, products=20.0, sample=1.0, h200_seconds=6.4)

    @property
    def suffix(self) -> str:
        mlx = self.options.layout == "mlx"
        zero = "-sym" if self.options.sym and not mlx else ""
        grid = f"awq{self.changed('solver')}-{self._bits_and_groups}{zero}"
        return grid + self._outside + ("-mlx" if mlx else "")

    @property
    def layout(self) -> Layout:
        options = self.options
        if options.layout != "awq":
            return self._other_layout()
        return AwqLayout(options.group_size, not options.sym)

    def check(self) -> None:
        super().check()
        what = f"--candidates {self.options.candidates} leaves nothing to search"
        require(self.options.candidates >= 2, what, "choose 2 or more", USAGE)

    def grid(self, width: Width, name: str) -> affine.AffineGrid:
        feedback, leaf = self.options.solver != "rtn", name.rpartition(".")[2]
        clip = self.options.search_scale and not feedback and not leaf.startswith(UNCLIPPED)
        signed, width = self.options.signed_scales, (width.bits, width.group_size, width.symmetric)
        return affine.AffineGrid(*width, search=feedback, clip=clip, signed=signed)

    def transform(self, solver: Solver) -> AwqScaling:
        """Return the scaling of each block."""
        from quantkit.quantize.transforms.awq import AwqScaling

        return AwqScaling(self.options.candidates)
