"""What is asked of a conversation: the flags of `quantkit chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.errors import USAGE, QuantkitError
from quantkit.options import option


@dataclass(frozen=True)
class Settings:
    """Where None is said, the checkpoint or the engine decides."""

    system: str = option("", "The system message.")
    tokens: int = option(1024, "New tokens per answer at most.", short="-n")
    temperature: float | None = option(
        None,
        "0: the likeliest token, always. Above: sample, the higher the wilder. (default: as the checkpoint's "
        "generation_config.json or GGUF metadata recommend, which is said; else 0)",
    )
    top_k: int | None = option(
        None, "Sample from so many of the likeliest tokens only; 0: from all. (default: as recommended)"
    )
    top_p: float | None = option(
        None,
        "Sample from the likeliest tokens that together have this probability. (default: as recommended)",
    )
    seed: int = option(0, "Of the first answer; each further one has the next.")
    ctx: str | None = option(
        None, "Tokens of the conversation at most, such as 8192 or 32k. (default: the model's, at most 8192)"
    )
    template: Path | None = option(None, "Use the chat template of this Jinja file.")
    raw: bool = option(False, "No roles and no template: the model goes on from your text.")
    engine: Literal["auto", "transformers", "llama.cpp"] = option(
        "auto", "auto: llama.cpp for GGUF files where it is installed, else transformers."
    )
    decoded: bool = option(False, "Decode packed weights even where their kernels are installed.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision. auto: the checkpoint's where the hardware has it."
    )
    kv_dtype: str | None = option(None, "Of llama.cpp's cache: fp16, bf16, fp32, q8_0, q4_0. (default: fp16)")
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto: cuda where there is one.")
    threads: int = option(0, "CPU threads; 0: as many as the engine chooses.")

    def check(self) -> None:
        """Raise QuantkitError for what makes no sense."""
        if self.threads < 0:
            raise QuantkitError(f"--threads {self.threads} makes no sense", "choose 1 or more", USAGE)
        if self.raw and self.template:
            raise QuantkitError("a raw text needs no --template", "leave out one of them", USAGE)
