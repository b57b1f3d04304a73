"""ternary: three values a weight, by rounding or by error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.layouts.trits import TritsLayout

from quantkit.layouts import Width
from quantkit.options import option
from quantkit.quantize.methods import Method, Work, refuse_override

SUMMARY = "Ternary: a toy of three values a weight."
WORK = Work(0, 0, (1e-9, 1e-8))


@dataclass(frozen=True)
class Options:
    group_size: int = option(32, "Weights that share a scale.")
    solver: Literal["rtn", "gptq"] = option("rtn", "rtn rounds to nearest; gptq feeds errors back.")


def suffix(options: Options) -> str:
    return "ternary"


def check(options: Options) -> None:
    """Any will do."""


def layout(options: Options) -> TritsLayout:
    return TritsLayout(options.group_size)


def width(options: Options, in_features: int, override=None) -> Width:
    refuse_override(override, "ternary has one width")
    return Width(2, options.group_size)


def build(options: Options, calibrated: bool = False, skeleton=None) -> Method:
    from quantkit.grids.ternary import TernaryGrid

    from quantkit.quantize.solvers.gptq import GptqSolver
    from quantkit.quantize.solvers.rtn import RtnSolver

    solver = GptqSolver() if options.solver == "gptq" else RtnSolver()
    return Method("ternary", solver, layout(options), lambda *_: TernaryGrid(options.group_size))
