"""The flags of `quantkit eval`, `generate` and `sample`. Those of `eval` are the options of
`quantkit.evaluate`, too. This module does not import torch."""

import math
from dataclasses import MISSING, dataclass
from typing import Literal

from quantkit.errors import USAGE, QuantkitError, did_you_mean, name_all, nearest, require
from quantkit.evaluation.comparison import gates
from quantkit.options import check_value, flag_of, option, parse_tokens, size_bytes, text_column
from quantkit.quantize import methods
from quantkit.quantize.prepare import recipe


@dataclass(frozen=True)
class EvalSettings:
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
    engine: Literal["transformers", "vllm", "llama.cpp", "mlx"] | None = option(
        None, "Compare the probabilities of this engine with those of quantkit's own decode."
    )
    python: str | None = option(
        None, "Python that has the engine's package. (default: this one)", metavar="PATH"
    )
    engine_option: tuple[str, ...] = option(
        (),
        "Option for the engine as it loads a model, such as dtype=float32. Repeatable.",
        metavar="NAME=VALUE",
    )
    max_memory: str | None = option(
        None,
        "Host memory of the whole process at most, such as 6GB. Hidden states that do not fit are kept in a "
        "file in TMPDIR or /var/tmp. (default: the free memory)",
        metavar="SIZE",
    )

    @property
    def limits(self) -> tuple[str | None, ...]:
        """The texts of the gates."""
        return self.max_ppl_increase, self.max_kld, self.min_top1

    def check(self) -> None:
        """Raise QuantkitError for methods and options of --as that do not exist, options without the engine
        or the tasks that they belong to, and an invalid gate or --max-memory."""
        gates.parse(*self.limits)
        fits = self.engine or (self.python is None and not self.engine_option)
        require(fits, "--python and --engine-option need --engine", "add --engine NAME", USAGE)
        fits = self.tasks or self.task_limit is None
        require(fits, "--task-limit needs --tasks", "add --tasks NAMES", USAGE)
        for typed in self.trials:
            trial_method(typed)
        if self.max_memory is not None:
            size_bytes(self.max_memory, "--max-memory")


def trial_method(typed: str) -> methods.Method:
    """Return the method of `--as`, `METHOD` or `METHOD,OPTION=VALUE,…`. Raises QuantkitError."""
    name, *settings = typed.split(",")
    if name not in methods.available():
        free = [other for other in methods.available() if not methods.load(other).work.sample]
        hint = f"{did_you_mean(nearest(name, methods.available()))}choose {' or '.join(free)}"
        raise QuantkitError(f"--as {typed}: no such method", hint, USAGE)
    methods.create(name).build()  # refuses gguf, which writes files only, before its options are looked at
    method = recipe.method_with(name, settings, "--as")
    method.check()
    outside = [f"{flag}={bits}" for flag in ("head", "embedding") if (bits := getattr(method.options, flag))]
    hint = f"leave {name_all(outside)} out, or write it with quantkit {name}, then evaluate that folder"
    require(not outside, f"--as {typed}: only linears of blocks are tried on the fly", hint, USAGE)
    return method


def check_temperature(value: float) -> None:
    """Raise QuantkitError for a temperature by which logits cannot be divided."""
    check_value("--temperature", value, value == 0 or 1e-4 <= value < math.inf, "choose 0, or 0.1 to 2")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are chosen."""

    tokens: int = option(64, "New tokens, at most.", short="-n")
    temperature: float = option(0.0, "0: always the most likely token. Above: sample; higher is more random.")
    seed: int = option(0, "Seed of the sampling.")
    top_k: int = option(0, "Sample from the K most likely tokens; 0: from all.")
    top_p: float = option(1.0, "Sample from the most likely tokens that together have this probability.")

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        check_value("-n", self.tokens, self.tokens >= 1, "choose 1 or more")
        check_temperature(self.temperature)
        check_value("--top-k", self.top_k, self.top_k >= 0, "choose 0 (all) or more")
        check_value("--top-p", self.top_p, 0 < self.top_p <= 1, "choose above 0, up to 1")
        if not self.temperature and (self.top_k or self.top_p < 1):
            hint = "add --temperature 1, or leave out --top-k and --top-p"
            raise QuantkitError("--top-k and --top-p are for sampling", hint, USAGE)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Sampling):
    """Settings of `quantkit generate`, equal for all models."""

    prompt: str = option(MISSING, "Text to continue; - reads stdin.", short="-p")
    chat: bool = option(False, "Put the prompt into the model's chat template.")

    def check(self) -> None:
        """Raise QuantkitError for invalid values."""
        super().check()
        require(self.prompt, "the prompt is empty", "give some text with -p", USAGE)


@dataclass(frozen=True)
class SampleSettings:
    """Settings of `quantkit sample`. The text depends on batch_size as well."""

    samples: int = option(128, "Number of calibration sequences. One in 16, and one more, are spare.")
    seqlen: int = option(512, "Tokens of each sequence.")
    seed: int = option(0, "Seed of the sampling.")
    batch_size: int = option(32, "Sequences generated at once. More are faster and need more memory.")

    def check(self, source: str, context: int | None) -> None:
        """Raise QuantkitError for invalid values. context: of the model `source`, None without a limit."""
        for name, least in (("samples", 1), ("seqlen", 2), ("batch_size", 1)):
            value = getattr(self, name)
            check_value(flag_of(name), value, value >= least, f"choose {least} or more")
        what = f"{source} was made for {context} tokens, not --seqlen {self.seqlen}"
        fits = context is None or self.seqlen <= context
        require(fits, what, f"choose at most --seqlen {context}", USAGE)
