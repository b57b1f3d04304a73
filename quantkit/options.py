"""Options that every method shares. They become command-line flags, so this module never imports torch."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import USAGE, QuantkitError, did_you_mean, nearest, require

MOST = 1 << 32  # maximum of numbers of tokens
MOST_THREADS = 1024  # far more end the process: OpenMP cannot start them
SHARD_GB = 5.0  # default of --max-shard-gb; a GGUF file is whole by default
BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20}  # units of token numbers
DEVICES = r"auto|cpu|mps|(cuda|xpu|hpu|npu)(:\d+)?"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


def size_bytes(text: str, flag: str) -> int:
    """Parse a size such as `3.5GiB` or `4G` and return bytes. Raises QuantkitError for other texts."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]i?)?(B)?\s*", text, re.IGNORECASE)
    if not parts or float(parts[1]) == 0:
        raise QuantkitError(f"{flag} {text!r} is not a size", "write 4GB, 700MB or 3.5GiB", USAGE)
    hint = f"write {flag} {text}GB, or {text}B for bytes"
    require(parts[2] or parts[3], f"{flag} {text} has no unit", hint, USAGE)
    return int(float(parts[1]) * UNITS[(parts[2] or "").upper()])


def mean_bits(typed: str) -> str:
    """Return the hint for a fraction typed as a number of bits; "" for other texts."""
    hint = f"for a mean of {typed} bits, different in each linear: quantkit auto MODEL --bpw {typed}"
    return hint if re.fullmatch(r"\d+\.\d*[1-9]0*", typed) else ""


def parse_tokens(text: str) -> int:
    """Parse a number of tokens, such as `8192` or `32k` (32,768). Raises QuantkitError for other texts."""
    match = re.fullmatch(r"(\d{1,10})\s*([KM]?)", text.strip().replace(",", "").replace("_", "").upper())
    if not match or not 1 <= (tokens := int(match[1]) * BINARY[match[2]]) <= MOST:
        raise QuantkitError(f"--ctx {text} is invalid", "write a number such as 8192 or 32k", USAGE)
    return tokens


def flag_of(name: str) -> str:
    """Return the flag of an option: `prompt_tokens` becomes `--prompt-tokens`."""
    return f"--{name.replace('_', '-')}"


def check_value(flag: str, value: float | None, fits: bool, hint: str) -> None:
    """Raise QuantkitError (exit code 2), `FLAG VALUE is invalid`, unless the value fits."""
    shown = f"{value:g}" if isinstance(value, float) else value
    require(fits, f"{flag} {shown} is invalid", hint, USAGE)


def check_machine(device: str | None, threads: int | None) -> None:
    """Raise QuantkitError for an invalid --device or --threads, without importing torch. If torch is already
    imported, devices of its extensions are valid too."""
    fits = threads is None or 1 <= threads <= MOST_THREADS
    check_value("--threads", threads, fits, f"choose 1 to {MOST_THREADS}")
    if device and "torch" not in sys.modules and not re.fullmatch(DEVICES, device):
        raise unknown_device(device)


def unknown_device(name: str) -> QuantkitError:
    """Return the error for a device that no machine has."""
    near = did_you_mean(nearest(name, ("auto", "cpu", "cuda", "mps")))
    return QuantkitError(f"{name!r} is not a device", f"{near}choose auto, cpu, cuda, cuda:N or mps", USAGE)


def option(
    default: Any,
    help: str,
    short: str | None = None,
    names: Iterable[str] = (),
    negated: bool = False,
    parser: Callable[[str], Any] | None = None,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a dataclass field from which cli/flags.py also makes a command-line flag.

    short: short name of the flag, such as `-t`. names: values that shell completion offers. negated: also
    make a `--no-…` flag for the default False, to override a recipe. parser: converts the typed text. flag,
    metavar: names of the flag and of its value in the help, if not the field's and the type's.
    """
    metadata = {"help": help, "short": short, "names": tuple(names), "negated": negated, "parser": parser}
    return dataclasses.field(default=default, metadata=metadata | {"flag": flag, "metavar": metavar})


def text_column() -> Any:
    """Return the option that names the column of a text, for every dataclass that takes a text."""
    return option(
        "text",
        "Key or column that holds the text or the conversations; if it is missing, messages or "
        "conversations. Conversations are rendered with the model's chat template.",
    )


@dataclass(frozen=True)
class CalibrationOptions:
    """The calibration text: source, number and length of sequences."""

    calibration: str | None = option(
        None,
        "Calibration text: a .txt, .jsonl, .json, .csv, .tsv or .parquet file, or a hub dataset: wikitext2, "
        "c4, ORG/NAME, ORG/NAME:SPLIT:COLUMN or ORG/NAME@CONFIG:SPLIT:COLUMN. Only the needed part of a "
        "dataset is downloaded. (default: the shipped text)",
    )
    calibration_revision: str | None = option(
        None, "Branch, tag or commit of the calibration dataset. (default: main; its commit is recorded)"
    )
    text_column: str = text_column()
    samples: int = option(128, "Number of calibration sequences.")
    seqlen: int | None = option(
        None, "Tokens per sequence. (default: 2048, or 512 for the shipped text; at most the model's context)"
    )
    seed: int = option(0, "Seed that chooses the parts of a long text.")


@dataclass(frozen=True)
class RunOptions:
    """How a job runs. Values for `auto` and None are chosen and recorded before weights are loaded."""

    exclude: tuple[str, ...] = option(
        (), "Keep linears in 16 bit whose name matches this regular expression. Repeatable."
    )
    override: tuple[str, ...] = option(
        (),
        "REGEX=BITS[,GROUP_SIZE]: use other bits for linears whose name matches. Repeatable; the first "
        "match counts.",
    )
    experts: Literal["shrink", "routed", "all"] = option(
        "shrink",
        "Tokens that calibrate each expert. routed: the tokens that are routed to the expert. shrink: the "
        "same, mixed with all tokens of the layer if they are few. all: all tokens of the layer.",
    )
    allow_unread: bool = option(False, "Allow experts in a layout that only quantkit reads, such as int8.")
    allow_requantize: bool = option(
        False, "Allow a checkpoint that is already quantized as the source. The errors add up."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of forward passes. auto: the checkpoint's own if the hardware supports it, else float32.",
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps; auto takes cuda if available.")
    batch_size: int | None = option(
        None, "Sequences per forward pass. (default: about 2048 tokens, 8192 on an accelerator)"
    )
    sequential: Literal["auto", "suspend", "repeat"] = option(
        "auto",
        "How the inputs of each site (linears with the same input) are collected. suspend: one forward pass "
        "for each block, which pauses at each site; faster on a CPU. repeat: one pass up to each site; less "
        "memory. auto: repeat on an accelerator, else by free memory.",
    )
    states: Literal["auto", "device", "host", "disk"] = option(
        "auto",
        "Where the hidden states of the calibration tokens are kept: GPU memory (device), host memory or a "
        "file. auto: by free memory. The output is the same.",
    )
    max_memory: str | None = option(
        None,
        "Host memory that the whole process may use, such as 6GB. (default: the free memory, within the "
        "limits of a container or ulimit)",
    )
    threads: int | None = option(None, "CPU threads. (default: all cores)")
    loss_tokens: int | None = option(
        None,
        "Tokens of held-back calibration text on which the loss of the output is measured; 0: no "
        "measurement. (default: 512; without calibration 256 of the shipped held-out text)",
    )
    max_shard_gb: float | None = option(
        None, "Largest size of a weight file, in GB. (default: 5; GGUF: no limit)"
    )

    def check(self) -> None:
        """Raise QuantkitError for an invalid value."""
        size = self.batch_size
        check_value("--batch-size", size, size is None or size >= 1, "choose 1 or more")
        check_machine(self.device, self.threads)
        tokens, shard = self.loss_tokens, self.max_shard_gb
        check_value("--loss-tokens", tokens, tokens in (None, 0) or tokens >= 16, "choose 0, or 16 or more")
        if self.max_memory is not None:
            size_bytes(self.max_memory, "--max-memory")
        fits = shard is None or 0 < shard < math.inf
        check_value("--max-shard-gb", shard, fits, "choose a positive size, such as 5")
