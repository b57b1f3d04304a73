"""Options that several methods share, such as `--solver` and `--transform`."""

from typing import Any

from quantkit.options import option

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
NAMES = {  # of options that have a few values
    "solver": SOLVERS,
    "target": TARGETS,
    "transform": ("none", "awq", "auto"),
    "smoothing": ("none", "smooth"),
}
OPTIONS = {  # options that several methods share: name -> (default, help)
    "damp": (0.05, "gptq, yaqa: share of the mean of the Hessian's diagonal that is added to the diagonal."),
    "refine": (2, "gptq, yaqa: rounds of coordinate descent on codes and scales after the error feedback."),
    "solver": (
        "gptq",
        "rtn: round to nearest, in seconds and without calibration text. gptq: error feedback on calibration "
        "text, less loss at the same size. yaqa: error feedback that also uses gradients of the model's "
        "loss, less loss on some models, in several times the time.",
    ),
    "act_order": (
        "group",
        "gptq, yaqa: order of columns. none: as stored. group: large inputs first inside each group.",
    ),
    "target": (
        "original",
        "gptq, yaqa: the output that a quantized linear approximates. original: the original model's output, "
        "which compensates the errors of earlier linears. own: the output of its original weights on the "
        "quantized model's inputs: more loss, less memory and time.",
    ),
    "signed_scales": (
        True,
        "Symmetric grids: scales may be negative, for less loss at the same size. --no-signed-scales is for "
        "kernels that expect scales above 0, such as vLLM's with VLLM_MARLIN_INPUT_DTYPE=int8.",
    ),
    "head": (0, "Also quantize the head, to this many bits. 0: keep it in 16 bit."),
    "embedding": (
        0,
        "Also quantize the embedding, to this many bits, for --layout mlx; in a model without a head of its "
        "own this is the head, too. 0: keep it in 16 bit.",
    ),
    "transform": (
        "auto",
        f"{REWRITE}auto: scale columns up, and their inputs down, if --solver gptq then loses less. awq: the "
        "same, judged by the loss of round to nearest. none: no rewrite.",
    ),
    "smoothing": (
        "smooth",
        f"{REWRITE}smooth: scale large inputs down, and the columns that read them up, if rounding both then "
        "loses less. none: no rewrite; --solver rtn then needs no calibration text.",
    ),
}


def shared(name: str, default: Any = None) -> Any:
    """Return the dataclass field of an option that several methods share. default: replaces the usual one."""
    usual, help = OPTIONS[name]
    return option(usual if default is None else default, help, names=NAMES.get(name, ()))
