"""Solver and transform of methods with error feedback, and their options: `--solver`, `--damp`, `--refine`,
`--target` and `--transform`.

torch is imported inside functions, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from quantkit.errors import USAGE, one_of, require
from quantkit.options import check_value, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.scaling import ColumnScaling

LAYOUTS = (
    "Layout on disk. {}: most clients. compressed-tensors: vLLM and SGLang. mlx: mlx-lm; groups of 32, 64 or "
    "128, each with a float offset, whatever --sym says."
)
GROUP_SIZE = (
    "Weights that share a scale; -1 for a whole row. (default: 128, or the largest of 64 and 32 that "
    "divides the columns of all linears)"
)
SOLVERS = ("gptq", "yaqa", "rtn")  # no Literals: their width in the help would cut names off
TARGETS = ("own", "original")

REWRITE = "Rewrite the model before rounding, without changing its function. "
OPTIONS = {  # of several methods: name -> default, help, names
    "damp": (
        0.01,
        "gptq, yaqa: share of the mean of the Hessian's diagonal that is added to the diagonal.",
        (),
    ),
    "refine": (
        2,
        "gptq, yaqa: rounds of coordinate descent on codes and scales after the error feedback.",
        (),
    ),
    "solver": (
        "gptq",
        "rtn: round to nearest, in seconds and without calibration text. gptq: error feedback on calibration "
        "text, less loss at the same size. yaqa: error feedback that also uses gradients of the model's "
        "loss, the least loss, in several times the time.",
        SOLVERS,
    ),
    "act_order": (
        "group",
        "gptq, yaqa: order of columns. none: as stored. group: large inputs first inside each group.",
        (),
    ),
    "target": (
        "original",
        "gptq, yaqa: the output that a quantized linear approximates. original: the original model's output, "
        "which compensates the errors of earlier linears. own: the output of its original weights on the "
        "quantized model's inputs: more loss, less memory and time.",
        TARGETS,
    ),
    "head": (0, "Also quantize the head, to this many bits. 0: keep it in 16 bit.", ()),
    "embedding": (
        0,
        "Also quantize the embedding, to this many bits, for --layout mlx; in a model without a head of its "
        "own this is the head, too. 0: keep it in 16 bit.",
        (),
    ),
    "transform": (
        "auto",
        f"{REWRITE}auto: scale columns up, and their inputs down, if --solver gptq then loses less. awq: the "
        "same, judged by the loss of round to nearest. none: no rewrite.",
        ("none", "awq", "auto"),
    ),
    "smoothing": (
        "smooth",
        f"{REWRITE}smooth: scale large inputs down, and the columns that read them up, if rounding both then "
        "loses less. none: no rewrite; --solver rtn then needs no calibration text.",
        ("none", "smooth"),
    ),
}


def shared(name: str, default: Any = None) -> Any:
    """Return the dataclass field of an option that several methods share. default: replaces the usual one."""
    usual, help, names = OPTIONS[name]
    return option(usual if default is None else default, help, names=names)


def check(options: Any) -> None:
    """Raise QuantkitError if options of a method with error feedback are invalid."""
    check_value("--refine", options.refine, options.refine >= 0, "choose 0 or more")
    require(0 < options.damp < 1, f"--damp {options.damp} is no share", "choose one between 0 and 1", USAGE)
    names = {field.name: field.metadata["names"] for field in dataclasses.fields(options)}
    for name in ("solver", "target", "format", "transform"):
        if name in names:
            one_of(value := getattr(options, name), names[name], f"--{name} {value}: no such {name}")


def suffix(options: Any, *names: str) -> str:
    """Return the part of derived names for options that differ from the default, such as `-gptq-awq`."""
    default = type(options)()
    changed = (name for name in names or ("solver", "transform") if hasattr(options, name))
    values = (getattr(options, name) for name in changed if getattr(options, name) != getattr(default, name))
    return "".join(f"-{value}" for value in values)


def outside(options: Any) -> str:
    """Return the part of derived names for matrices outside the blocks, such as `-head8-embedding8`."""
    return "".join(f"-{name}{bits}" for name in ("head", "embedding") if (bits := getattr(options, name)))


def solver(options: Any, act_order: str, weighted: bool = False) -> Solver:
    """Return the solver for `--solver`. weighted: rtn weighs errors by activations; after a column scaling it
    always does."""
    from quantkit.quantize.solvers.gptq import GptqSolver
    from quantkit.quantize.solvers.rtn import RtnSolver
    from quantkit.quantize.solvers.yaqa import YaqaSolver

    if options.solver == "rtn":
        scaled = getattr(options, "transform", "none") in ("awq", "smooth")
        return RtnSolver(weighted=weighted or scaled)
    kind = {"gptq": GptqSolver, "yaqa": YaqaSolver}[options.solver]
    return kind(options.damp, act_order, options.refine, options.target)


def block_transform(
    value: str, solver: Solver, rounded: Callable[[Tensor], Tensor] | None = None
) -> ColumnScaling | None:
    """Return the transform of each block for `--transform VALUE`; with rtn, "auto" is None and needs no text.
    rounded: rounds inputs `[tokens, in]` of linears as clients do."""
    from quantkit.quantize.solvers.rtn import RtnSolver
    from quantkit.quantize.transforms.auto import FeedbackScaling
    from quantkit.quantize.transforms.awq import AwqScaling
    from quantkit.quantize.transforms.smooth import SmoothScaling

    if value == "auto" and not isinstance(solver, RtnSolver):
        return FeedbackScaling(solver)
    if value == "smooth":
        return SmoothScaling(solver, rounded)
    return AwqScaling() if value == "awq" else None
