"""Solver and transform of methods with error feedback, and their options: `--solver`, `--damp`, `--refine`,
`--target` and `--transform` (one part, or several joined by `+`).

torch is imported inside functions, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from quantkit.errors import USAGE, QuantkitError, one_of, require
from quantkit.options import option

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quantkit.quantize.solvers import Solver
    from quantkit.quantize.transforms.scaling import ColumnScaling

SOLVERS = ("gptq", "yaqa", "rtn")  # no Literals: their width in the help would cut names off
TARGETS = ("own", "original")
ROTATIONS = ("rotate", "rotate-v")  # of the whole model, before any block runs
TRANSFORMS = ("awq", "auto", *ROTATIONS)
SMOOTHED = ("smooth", *ROTATIONS)  # of methods that round activations


REWRITE = "Rewrite the model before rounding, without changing its function. "
ROTATE = (
    "rotate: rotate hidden states and attention values; a tied head becomes a tensor of its own. rotate-v: "
    "rotate attention values only. "
)
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
    "transform": (
        "auto",
        f"{REWRITE}auto: scale columns up, and their inputs down, if --solver gptq then loses less. awq: the "
        f"same, judged by the loss of round to nearest. {ROTATE}rotate+auto: both. none: no rewrite.",
        ("none", *TRANSFORMS),
    ),
    "smoothing": (
        "smooth",
        f"{REWRITE}smooth: scale large inputs down, and the columns that read them up, if rounding both then "
        f"loses less. {ROTATE}rotate+smooth: both. none: no rewrite; --solver rtn then needs no calibration "
        "text.",
        ("none", *SMOOTHED),
    ),
}


def shared(name: str, default: Any = None) -> Any:
    """Return the dataclass field of an option that several methods share. default: replaces the usual one."""
    usual, help, names = OPTIONS[name]
    return option(usual if default is None else default, help, names=names)


def check(options: Any) -> None:
    """Raise QuantkitError if options of a method with error feedback are invalid."""
    require(options.refine >= 0, f"--refine {options.refine} is invalid", "choose 0 or more", USAGE)
    require(0 < options.damp < 1, f"--damp {options.damp} is no share", "choose one between 0 and 1", USAGE)
    names = {field.name: field.metadata["names"] for field in dataclasses.fields(options)}
    for name in ("solver", "target", "format"):
        if name in names:
            one_of(value := getattr(options, name), names[name], f"--{name} {value}: no such {name}")
    if "transform" in names:
        transform_parts(options.transform, names["transform"][1:])


def transform_parts(value: str, transforms: tuple[str, ...] = (*TRANSFORMS, "smooth")) -> tuple[str, ...]:
    """Return the parts of `--transform VALUE`; () for "none". Raises QuantkitError if a part is unknown or
    two parts exclude each other."""
    parts = () if value == "none" else tuple(value.split("+"))
    if unknown := [part for part in parts if part not in transforms]:
        hint = f"choose none, or {', '.join(transforms)}, or a rotation and another joined by +"
        raise QuantkitError(f"--transform {value}: no transform {unknown[0]!r}", hint, USAGE)
    turned = [part for part in parts if part in ROTATIONS]
    if len(turned) > 1 or len(parts) - len(turned) > 1:
        raise QuantkitError(f"--transform {value} has two of one kind", "choose one of them", USAGE)
    return parts


def rotation(options: Any) -> str | None:
    """Return the part of `--transform` that rotates the whole model; None without one."""
    parts = transform_parts(getattr(options, "transform", "none"))
    return next((part for part in parts if part in ROTATIONS), None)


def suffix(options: Any, *names: str) -> str:
    """Return the part of derived names for options that differ from the default, such as `-gptq-awq`."""
    default = type(options)()
    changed = (name for name in names or ("solver", "transform") if hasattr(options, name))
    values = (getattr(options, name) for name in changed if getattr(options, name) != getattr(default, name))
    return "".join(f"-{value}" for value in values)


def solver(options: Any, act_order: str, weighted: bool = False) -> Solver:
    """Return the solver for `--solver`. weighted: rtn weighs errors by activations; after a column scaling it
    always does."""
    from quantkit.quantize.solvers.gptq import GptqSolver
    from quantkit.quantize.solvers.rtn import RtnSolver
    from quantkit.quantize.solvers.yaqa import YaqaSolver

    if options.solver == "rtn":
        scaled = {"awq", "smooth"}.intersection(transform_parts(getattr(options, "transform", "none")))
        return RtnSolver(weighted=weighted or bool(scaled))
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

    parts = transform_parts(value)
    if "auto" in parts and not isinstance(solver, RtnSolver):
        return FeedbackScaling(solver)
    if "smooth" in parts:
        return SmoothScaling(solver, rounded)
    return AwqScaling() if "awq" in parts else None
