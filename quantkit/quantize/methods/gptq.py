"""gptq: affine integer grid, Hessian error feedback (arXiv:2210.17323), in three layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import USAGE, QuantkitError, require
from quantkit.layouts import Layout, Width
from quantkit.layouts._late import affine
from quantkit.layouts.gptq import SPLIT, GptqLayout
from quantkit.options import option
from quantkit.quantize.methods import MethodOptions, Work, _options
from quantkit.quantize.methods._affine import AffineMethod

INPUTS = ("16bit", "fp8", "int8")
ALONE = "of 5 to 7 bits the gptq layout loads in GPTQModel alone, --layout compressed-tensors in transformers"


@dataclass(frozen=True)
class Options(MethodOptions):
    bits: int = option(4, "Bits per weight, 2 to 8. 4 and 8 run fastest; few clients run 5 to 7.")
    group_size: int | None = option(None, _options.GROUP_SIZE)
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
        "gptq, yaqa: search each group's scale for the least error of the outputs. --no-search-scale fits "
        "the largest weight, as --solver rtn does.",
    )
    signed_scales: bool = _options.shared("signed_scales")
    damp: float = _options.shared("damp")
    refine: int = _options.shared("refine")
    target: str = _options.shared("target")
    solver: str = _options.shared("solver")
    transform: str = _options.shared("transform")
    head: int = _options.shared("head")
    embedding: int = _options.shared("embedding")
    layout: Literal["gptq", "compressed-tensors", "mlx"] = option("gptq", _options.LAYOUTS.format("gptq"))
    activations: str = option(
        "16bit",
        "Type of the inputs of linears (W4A8), for --layout compressed-tensors. Not tried on a GPU.",
        names=INPUTS,
    )
    checkpoint_format: Literal["gptq", "gptq_v2"] = option(
        "gptq",
        "gptq: loads everywhere. gptq_v2: also stores zero points of 0, but old clients read it wrong.",
    )


class Gptq(AffineMethod):
    """GPTQ: 2 to 8 bit integers chosen by Hessian error feedback on calibration text."""

    Options = Options
    options: Options
    variants = {
        "gptq-head8": ({"head": 8}, "16 bit"),
        "mlx": ({"layout": "mlx", "group_size": 64, "embedding": 8}, "16 bit"),
    }
    work = Work(1.1, search=3.2, sample=1 / 8, h200_seconds=6.9)

    @property
    def suffix(self) -> str:
        options = self.options
        layout = {"gptq": "", "compressed-tensors": "-ct", "mlx": "-mlx"}[options.layout]
        zero = "" if options.sym or options.layout == "mlx" else "-asym"
        inputs = f"-a-{options.activations}" if options.activations != "16bit" else ""
        name = f"{options.solver}-{self._bits_and_groups}{zero}{self._outside}{inputs}"
        return name + self.changed("transform") + layout

    @property
    def layout(self) -> Layout:
        options = self.options
        if options.layout != "gptq":
            return self._other_layout(options.activations.removesuffix("16bit"))
        return GptqLayout(
            bits=options.bits,
            group_size=options.group_size,
            symmetric=options.sym,
            desc_act=options.solver != "rtn" and options.act_order == "full",
            damp_percent=options.damp,
            version=3 if options.bits in SPLIT else 1 if options.checkpoint_format == "gptq" else 2,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        options = self.options
        return (ALONE,) if options.layout == "gptq" and {options.bits, options.head} & {*SPLIT} else ()

    def check(self) -> None:
        super().check()
        options = self.options
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

    def grid(self, width: Width, name: str) -> affine.AffineGrid:
        layout = self.layout
        zero_min = layout.zero_min if isinstance(layout, GptqLayout) else 0
        given = width.bits, width.group_size, width.symmetric, zero_min, self.options.search_scale
        # W4A8: vLLM's kernel reads scales as unsigned integers (issue 48905)
        signed = self.options.signed_scales and self.options.activations == "16bit"
        return affine.AffineGrid(*given, signed=signed)
