"""Flags of `quantkit auto`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.capacity.question import Question
from quantkit.errors import USAGE, QuantkitError, one_of, require
from quantkit.models.files.gguf_shards import base_name, destination
from quantkit.options import check_value, flag_of, option, parse_tokens, size_bytes
from quantkit.quantize.methods import _options as method_options
from quantkit.quantize.prepare.request import JobFlags

BUDGETS = ("bpw", "max_size", "max_kld", "gpu")
SEARCHED_BY = ("gptq", "yaqa")  # solvers whose results are worth a search


@dataclass(frozen=True)
class AutoOptions:
    """The budget of the search, the engine, and the text to measure results on."""

    bpw: float | None = option(
        None,
        "Largest average of bits per weight, scales included, over the linears of the blocks; in a GGUF file "
        "also over embedding and output matrix.",
    )
    max_size: str | None = option(None, "Largest size of all files on disk, such as 4GB, 700MB or 3.5GiB.")
    max_kld: float | None = option(
        None, "Largest KL divergence from the original, in nats per token: find the smallest such model."
    )
    gpu: str | None = option(
        None, "Device that the model must fit, with the best type of the KV cache, such as rtx-3090."
    )
    batch: int = option(1, "With --gpu: sequences at once.")
    engine: Literal["any", "llama.cpp", "transformers", "vllm"] = option(
        "any",
        "Engine that loads the result. llama.cpp: a GGUF file. vllm, transformers: 2 to 8 bits as "
        "compressed-tensors (vllm: on a GPU only 4 and 8 bits were tried). any: 2, 3, 4 and 8 bits in the "
        "gptq layout.",
    )
    sym: bool = option(
        True,
        "Symmetric grids. --no-sym, for --engine any: a zero point per group, which fewer kernels support.",
    )
    solver: str = option(
        "gptq",
        "Solver of the result and of the preset that it is compared with. yaqa: error feedback that also "
        "uses gradients of the model's loss: less loss, in several times the time. The search uses gptq.",
        names=SEARCHED_BY,
    )
    target: str = method_options.shared("target")
    head: int = method_options.shared("head")
    search_tokens: int = option(2048, "Calibration tokens that the search measures divergences on.")
    search_streams: int = option(
        128, "Models that are measured together. Each keeps hidden states in memory."
    )

    text: Path | None = option(
        None, "Text to measure results on. (default: a held-out eighth of the calibration text)"
    )
    ctx: int | None = option(
        None,
        "Tokens of a sequence, such as 2048 or 32k: of a window of --text, and with --gpu in the KV cache. "
        "(default: 2048, at most the model's context)",
        parser=parse_tokens,
    )
    limit: int | None = option(None, "Use the first N tokens of --text.")
    sensitivities: Path | None = option(
        None,
        "File of measured sensitivities, to search further budgets faster: read if it exists, else written.",
    )
    recipe_out: Path | None = option(
        None,
        "Write the result as a recipe, too: quantkit run FILE then makes the same model without a search.",
    )

    def check(self) -> None:
        """Raise QuantkitError for an invalid value, or unless exactly one budget is given."""
        budgets = [flag_of(name) for name in BUDGETS if getattr(self, name) is not None]
        hint = "give --bpw 4.25, --max-size 4GB, --max-kld 0.02 or --gpu NAME"
        require(budgets, "no budget is given", hint, USAGE)
        what = f"{' and '.join(budgets)} are {len(budgets)} budgets"
        require(len(budgets) == 1, what, "give one of them", USAGE)
        Question(gpu=self.gpu, batch=self.batch).check()
        out = "leave it out"
        require(self.limit is None or self.text, "--limit is for --text", f"add --text FILE, or {out}", USAGE)
        what = "--ctx is for --text and --gpu"
        require(self.ctx is None or self.text or self.gpu, what, out, USAGE)
        require(self.batch == 1 or self.gpu, "--batch is for --gpu", f"add --gpu NAME, or {out}", USAGE)
        if self.head and self.engine == "llama.cpp":
            raise QuantkitError("--engine llama.cpp searches the head as well", "leave out --head", USAGE)
        for name in ("bpw", "max_kld", "search_tokens", "search_streams"):
            value = getattr(self, name)
            fits = value is None or 0 < value < math.inf
            check_value(flag_of(name), value, fits, "choose a positive number")
        hint = "choose less than the 16 bits of an original's weight, such as 4.25"
        check_value("--bpw", self.bpw, self.bpw is None or self.bpw < 16, hint)
        for name, names in {"solver": SEARCHED_BY, "target": method_options.TARGETS}.items():
            value = getattr(self, name)
            one_of(value, names, f"--{name} {value} is not supported by auto")
        if self.max_size is not None:
            size_bytes(self.max_size, "--max-size")


@dataclass(frozen=True)
class AutoRequest(JobFlags):
    """The user's request. typed: calibration and run options that were typed, by dotted key."""

    source: str
    options: AutoOptions
    typed: dict[str, Any]

    @property
    def destination(self) -> Path:
        """The output's path: as requested, or a derived name such as `model-auto-3.5bpw`. For a
        GGUF file in a requested folder: the derived name in this folder."""
        options, one_file = self.options, self.options.engine == "llama.cpp"
        if options.bpw is not None:
            budget = f"{options.bpw:g}bpw"
        elif options.max_size is not None:
            budget = options.max_size.replace(" ", "")
        else:
            budget = options.gpu or f"kld{options.max_kld:g}"
        name = f"{base_name(self.source)}-auto-{budget}{'.gguf' * one_file}"
        return destination(self.output, name)
