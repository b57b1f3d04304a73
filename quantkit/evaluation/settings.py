"""The flags of `quantkit eval`, which are also the options of `quantkit.evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import one_of
from quantkit.options import option, parse_tokens, text_column
from quantkit.quantize import methods
from quantkit.quantize.prepare import recipe


@dataclass(frozen=True)
class Settings:
    """Text, windows, metrics and gates of an evaluation, and how it runs."""

    text: str | None = option(
        None,
        "Text to evaluate on, a file or a dataset as --calibration takes it, such as wikitext2: its test "
        "split. Never the calibration text. (default: the shipped held-out text)",
        metavar="TEXT",
    )
    text_column: str = text_column()
    trials: tuple[str, ...] = option(
        (),
        "Evaluate the first model as quantized by this method, without writing anything: int8, nf4 or fp8, "
        "or a method with options that need no text, such as fp4,solver=rtn. Repeatable.",
        flag="--as",
        metavar="METHOD[,OPTION=VALUE…]",
    )
    kv_dtype: tuple[str, ...] = option(
        (),
        "Evaluate every model also with a key/value cache of this type: fp8 as in vLLM, q8_0 or q4_0 as in "
        "llama.cpp. Repeatable.",
        metavar="TYPE",
    )
    weights_only: bool = option(
        False,
        "Evaluate models whose clients quantize activations (int8, fp8, w8a8, fp4) also without quantized "
        "activations, to separate the two losses.",
    )
    ctx: int | None = option(
        None,
        "Tokens of each window of the text, such as 2048 or 4k. (default: 2048, at most the model's context)",
        parser=parse_tokens,
    )
    stride: int | None = option(
        None, "Tokens from the start of a window to the start of the next. (default: --ctx, no overlap)"
    )
    limit: int | None = option(None, "Use the first N tokens of the text.")
    tasks: str | None = option(
        None,
        "Tasks of lm-evaluation-harness, separated by commas; needs quantkit's extra tasks. The task cloze "
        "comes with quantkit; the data of others is downloaded from the hub.",
        metavar="LIST",
    )
    task_limit: int | None = option(None, "Run the first N examples of every task only.")
    metrics: str | None = option(
        None,
        "Metrics, separated by commas: ppl, dppl, kld, top1, floor. Without kld and top1, less is computed. "
        "(default: all)",
        metavar="LIST",
    )
    max_ppl_increase: str | None = option(
        None,
        "Largest increase of perplexity over the first model: 2%, or a difference such as 0.5.",
        metavar="LIMIT",
    )
    max_kld: str | None = option(None, "Largest mean KL divergence, in nats.", metavar="LIMIT")
    min_top1: str | None = option(None, "Smallest top-1 agreement: 0.9 or 90%.", metavar="LIMIT")
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "Precision of the forward passes; 16 bit adds noise to small divergences."
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    max_memory: str | None = option(
        None,
        "Host memory of the whole process at most, such as 6GB. Hidden states that do not fit are kept in a "
        "file in TMPDIR or /var/tmp. (default: the free memory)",
        metavar="SIZE",
    )

    def check(self) -> None:
        """Raise QuantkitError for methods and options of --as that do not exist, without importing torch."""
        for typed in self.trials:
            name, *settings = typed.split(",")
            one_of(name, methods.available(), f"--as {typed}: no such method")
            methods.check(name, recipe.options(name, settings, "--as"))
