"""What methods with error feedback are composed of, and the options that say it: `--solver`, `--damp`,
`--refine`, `--target` and `--transform`, whose value is one part, or several joined by `+`.

torch is imported inside, so that `--help` stays instant.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from quantkit.errors import USAGE, QuantkitError
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


REWRITTEN = "What is rewritten before rounding so that the model computes the same. "
TURNED = "for which a tied head becomes a tensor of its own; rotate-v: the values alone; "
OPTIONS = {  # of several methods: name -> default, help, names
    "damp": (0.01, "gptq, yaqa: this share of the mean Hessian diagonal is added to it.", ()),
    "refine": (2, "gptq, yaqa: cycles of coordinate descent on codes and scales after the sweep.", ()),
    "target": (
        "own",
        "gptq: what a linear's output is to be: own, what it gives on the inputs that there are; original, "
        "what the original model has, so that it makes up for what was lost before: less divergence, twice "
        "the time.",
        TARGETS,
    ),
    "transform": (
        "auto",
        f"{REWRITTEN}auto: where --solver gptq "
        "loses less by it, columns are scaled, and what produces their inputs divided; awq: as AWQ does, by "
        "what round to nearest loses; rotate: the hidden states are, and values inside attention, "
        f"{TURNED}rotate+auto: both; none.",
        ("none", *TRANSFORMS),
    ),
    "smoothing": (
        "smooth",
        f"{REWRITTEN}smooth: channels of large "
        "inputs are divided, and columns that read them multiplied, as far as both roundings together lose "
        "less by it; rotate: the hidden states are, and values inside attention, "
        f"{TURNED}rotate+smooth: both; none.",
        ("none", *SMOOTHED),
    ),
}


def shared(name: str) -> Any:
    """A field of a method's Options that other methods have, too."""
    default, help, names = OPTIONS[name]
    return option(default, help, names=names)


def check(options: Any) -> None:
    """Raise QuantkitError for options of a method with error feedback that make no sense."""
    if options.refine < 0:
        raise QuantkitError(f"--refine {options.refine} makes no sense", "choose 0 or more", USAGE)
    if not 0 < options.damp < 1:
        raise QuantkitError(f"--damp {options.damp} is no share", "choose one between 0 and 1", USAGE)
    names = {field.name: field.metadata["names"] for field in dataclasses.fields(options)}
    for name in ("solver", "target", "format"):
        if name in names and (value := getattr(options, name)) not in names[name]:
            hint = f"choose {' or '.join(names[name])}"
            raise QuantkitError(f"--{name} {value}: no such {name}", hint, USAGE)
    if options.target == "original" and options.solver == "rtn":
        raise QuantkitError(
            "--target original is for --solver gptq: rounding to nearest has no target but the weight",
            "add --solver gptq, or leave it out",
            USAGE,
        )
    if "transform" in names:
        transform_parts(options.transform, names["transform"][1:])


def transform_parts(value: str, transforms: tuple[str, ...] = (*TRANSFORMS, "smooth")) -> tuple[str, ...]:
    """The parts of `--transform VALUE`; () for none. Raises QuantkitError for one that is not known, or two
    that exclude each other."""
    parts = () if value == "none" else tuple(value.split("+"))
    if unknown := [part for part in parts if part not in transforms]:
        hint = f"choose none, or {', '.join(transforms)}, of which a rotation joins another by +"
        raise QuantkitError(f"--transform {value}: no transform {unknown[0]!r}", hint, USAGE)
    turned = [part for part in parts if part in ROTATIONS]
    if len(turned) > 1 or len(parts) - len(turned) > 1:
        raise QuantkitError(f"--transform {value} asks for two of a kind", "choose one of them", USAGE)
    return parts


def rotation(options: Any) -> str | None:
    """The part of a method's `--transform` that turns the whole model."""
    parts = transform_parts(getattr(options, "transform", "none"))
    return next((part for part in parts if part in ROTATIONS), None)


def suffix(options: Any, *names: str) -> str:
    """What options other than their defaults add to derived names, such as `-gptq-awq`."""
    default = type(options)()
    changed = (name for name in names or ("solver", "transform") if hasattr(options, name))
    values = (getattr(options, name) for name in changed if getattr(options, name) != getattr(default, name))
    return "".join(f"-{value}" for value in values)


def solver(options: Any, act_order: str, weighted: bool = False) -> Solver:
    """The solver that a method's `--solver` names. weighted: rounding to nearest weighs by activations, as it
    does behind a scaling, too."""
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
    """What rewrites each block by `--transform VALUE`. Before round to nearest auto leaves everything as it
    is, so that it needs no text. rounded: inputs `[tokens, in]` of linears as clients round them."""
    from quantkit.quantize.solvers.rtn import RtnSolver
    from quantkit.quantize.transforms.auto import FeedbackScore
    from quantkit.quantize.transforms.awq import AwqScore
    from quantkit.quantize.transforms.scaling import ColumnScaling
    from quantkit.quantize.transforms.smooth import SmoothScore

    parts = transform_parts(value)
    if "auto" in parts and not isinstance(solver, RtnSolver):
        return ColumnScaling(FeedbackScore(solver))
    if "smooth" in parts:
        return ColumnScaling(SmoothScore(solver, rounded))
    return ColumnScaling(AwqScore()) if "awq" in parts else None
