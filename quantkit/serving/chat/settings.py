"""The flags of `quantkit chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantkit.errors import USAGE, require
from quantkit.models import kv_types
from quantkit.options import option, parse_tokens
from quantkit.serving.settings import LocalOptions


@dataclass(frozen=True)
class ChatSettings(LocalOptions):
    """Flags. If one is None, the checkpoint or the engine decides."""

    system: str = option("", "The system message.")
    tokens: int = option(1024, "New tokens per answer, at most.", short="-n")
    temperature: float | None = option(
        None,
        "0: always the most likely token. Above: sample; higher is more random. (default: as the model "
        "recommends, else 0)",
    )
    top_k: int | None = option(
        None, "Sample from the K most likely tokens; 0: from all. (default: as the model recommends)"
    )
    top_p: float | None = option(
        None,
        "Sample from the most likely tokens that together have this probability. (default: as the model "
        "recommends)",
    )
    seed: int = option(0, "Seed of the first answer; each further answer takes the next number.")
    ctx: int | None = option(
        None,
        "Tokens of a conversation, at most, such as 8192 or 32k. (default: the model's, at most 8192)",
        parser=parse_tokens,
    )
    template: Path | None = option(None, "Jinja file with a chat template to use instead of the model's own.")
    raw: bool = option(False, "Without roles and chat template: the model continues your text.")
    engine: Literal["auto", "transformers", "llama.cpp"] = option(
        "auto", "Engine that runs the model. auto: llama.cpp for GGUF files if installed, else transformers."
    )
    decoded: bool = option(
        False, "In transformers, compute with decoded weights instead of the layout's own kernels."
    )
    kv_dtype: str | None = option(
        None,
        "Precision of the KV cache in llama.cpp: fp16, bf16, fp32, q8_0 or q4_0. (default: fp16)",
        parser=kv_types.in_llamacpp,
        metavar="TYPE",
    )

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        for name in ("template", "system"):
            both = self.raw and getattr(self, name)
            require(not both, f"--raw takes no --{name}", "leave out one of them", USAGE)
