"""The flags of `quantkit chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option, parse_tokens


@dataclass(frozen=True)
class Settings:
    """Flags; for None the checkpoint or the engine decides."""

    system: str = option("", "The system message.")
    tokens: int = option(1024, "New tokens per answer at most.", short="-n")
    temperature: float | None = option(
        None,
        "0: the likeliest token. Above: sample. (default: as generation_config.json or GGUF metadata "
        "recommend, else 0)",
    )
    top_k: int | None = option(
        None, "Sample from this number of the likeliest tokens; 0: all. (default: as recommended)"
    )
    top_p: float | None = option(
        None,
        "Sample from the likeliest tokens that together have this probability. (default: as recommended)",
    )
    seed: int = option(0, "Seed of the first answer; each further answer takes the next number.")
    ctx: int | None = option(
        None,
        "Tokens of the conversation at most, such as 8192 or 32k. (default: the model's, at most 8192)",
        parser=parse_tokens,
    )
    template: Path | None = option(None, "Use the chat template of this Jinja file.")
    raw: bool = option(False, "No roles, no template: the model continues your text.")
    engine: Literal["auto", "transformers", "llama.cpp"] = option(
        "auto", "auto: llama.cpp for GGUF files where it is installed, else transformers."
    )
    decoded: bool = option(False, "Decode packed weights even where their kernels are installed.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision. auto: the checkpoint's where the hardware has it."
    )
    kv_dtype: str | None = option(
        None, "Precision of llama.cpp's cache: fp16, bf16, fp32, q8_0, q4_0. (default: fp16)"
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    threads: int | None = option(None, "CPU threads. (default: the choice of the engine)")

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        if self.raw and self.template:
            raise QuantkitError("--raw takes no --template", "leave out one of them", USAGE)
