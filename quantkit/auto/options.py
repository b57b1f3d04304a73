"""Flags of `quantkit auto`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import NOT_FOUND, USAGE, QuantkitError
from quantkit.options import option, size_bytes
from quantkit.quantize.prepare import composing

SEARCHED_BY = ("gptq", "yaqa")  # solvers whose results are worth a search


@dataclass(frozen=True)
class AutoOptions:
    """What the search is to find, and how its results are measured."""

    bpw: float | None = option(
        None,
        "At most so many bits per weight, scales and the like included, on average over all that is chosen: "
        "the linears of the blocks, and in a GGUF file embedding and output matrix, too.",
    )
    max_size: str | None = option(None, "At most so large on the disk, all files: 4GB, 700MB, 3.5GiB.")
    max_kld: float | None = option(
        None, "As small as possible with at most this KL divergence from the original, in nats per token."
    )
    engine: Literal["any", "llama.cpp", "transformers", "vllm"] = option(
        "any",
        "Who is to load it. llama.cpp: a GGUF file of any block types; vllm: 4 and 8 bits; transformers: 2 "
        "to 8 bits, with compressed-tensors; any: the gptq layout in the widths most clients read.",
    )
    sym: bool = option(
        True, "Symmetric grids, or with --engine any a zero point per group, which is better at 2 and 3 bits."
    )
    solver: str = composing.solver_option(
        "gptq",
        "What makes the result and the preset it is compared with. yaqa feeds errors back by gradients, too: "
        "less divergence, in several times the time. The search itself goes by gptq.",
        SEARCHED_BY,
    )
    target: str = composing.target_option()
    search_tokens: int = option(4096, "Tokens of the calibration text on which divergences are measured.")
    search_streams: int = option(64, "Streams of hidden states in memory at a time, at most.")

    text: Path | None = option(
        None,
        "Text on which the results are measured. (default: an eighth of the calibration text, which is held "
        "out of it)",
    )
    ctx: int | None = option(None, "Tokens of a window of --text.")
    limit: int | None = option(None, "First tokens of --text that are used.")
    sensitivities: Path | None = option(
        None, "Table of sensitivities: read where it is there, else written, for further budgets."
    )
    recipe_out: Path | None = option(
        None, "Write the result as a recipe, too: quantkit run FILE makes the same bytes without a search."
    )

    def check(self) -> None:
        """Raise QuantkitError unless there is one budget, and all make sense."""
        budgets = [name for name in ("bpw", "max_size", "max_kld") if getattr(self, name) is not None]
        if len(budgets) != 1:
            what = "no budget is given" if not budgets else f"{len(budgets)} budgets are given"
            raise QuantkitError(what, "give one of --bpw 4.25, --max-size 4GB or --max-kld 0.02", USAGE)
        for name in ("bpw", "max_kld", "search_tokens", "search_streams"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise QuantkitError(
                    f"--{name.replace('_', '-')} {value:g} makes no sense", "choose a positive number", USAGE
                )
        for name, names in {"solver": SEARCHED_BY, "target": composing.TARGETS}.items():
            if getattr(self, name) not in names:
                what = f"--{name} {getattr(self, name)} cannot be searched for"
                raise QuantkitError(what, f"choose {' or '.join(names)}", USAGE)
        if self.max_size is not None:
            size_bytes(self.max_size, "--max-size")
        if self.text and not self.text.is_file():
            raise QuantkitError(
                f"text {self.text} cannot be read: no such file", "check the path given to --text", NOT_FOUND
            )


@dataclass(frozen=True)
class AutoRequest:
    """What the user asked for. typed: calibration and run options by dotted key, which go into the recipe."""

    source: str
    options: AutoOptions
    typed: dict[str, Any]
    output: Path | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    overwrite: bool = False
