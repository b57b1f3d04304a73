"""Options every method shares, and how an option describes itself. No torch here: flags are made of these."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import USAGE, QuantkitError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_bytes(text: str, flag: str) -> int:
    """`3.5GiB` in bytes. Raises QuantkitError for what is no size."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG]i?B)?\s*", text, re.IGNORECASE)
    if not parts or float(parts[1]) == 0:
        raise QuantkitError(f"{flag} {text!r} is no size", "write 4GB, 700MB or 3.5GiB", USAGE)
    return int(float(parts[1]) * UNITS[(parts[2] or "").upper()])


def option(default: Any, help: str, short: str | None = None, names: Iterable[str] = ()) -> Any:
    """A dataclass field that is also a command-line flag: the default lives here and nowhere else.

    short: another name of the flag, such as `-t`. names: values that a shell is to offer.
    """
    metadata = {"help": help, "short": short, "names": tuple(names)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class CalibrationOptions:
    """What text the statistics are gathered on."""

    calibration: str | None = option(
        None,
        "Text (.txt), JSON lines (.jsonl) or parquet file to calibrate on, or a dataset of the hub, of "
        "which no more than needed is fetched: wikitext2, c4, ORG/NAME, ORG/NAME:SPLIT:COLUMN or "
        "ORG/NAME@CONFIG:SPLIT:COLUMN. (default: the shipped text)",
    )
    calibration_revision: str | None = option(
        None, "Branch, tag or commit of the calibration dataset. (default: main; the commit is recorded)"
    )
    text_column: str = option(
        "text",
        "Key or column of the text, or of conversations, which go through the model's chat template. "
        "(without text: messages or conversations)",
    )
    samples: int = option(128, "Calibration sequences.")
    seqlen: int | None = option(
        None, "Tokens per sequence. (default: 2048, or 512 for the shipped text; at most the model's context)"
    )
    seed: int = option(0, "Which parts of a long text are taken.")


@dataclass(frozen=True)
class RunOptions:
    """How the job runs. `auto` and None are decided before anything is loaded, and recorded."""

    exclude: tuple[str, ...] = option(
        (), "Keep linears whose name matches this regular expression in 16 bit. Repeatable."
    )
    override: tuple[str, ...] = option(
        (),
        "REGEX=bits[,group_size]: quantize the linears whose name matches to other bits. Repeatable, the "
        "first match counts.",
    )
    experts: Literal["shrink", "routed", "all"] = option(
        "shrink",
        "Statistics of experts in a mixture: of the tokens routed to each, with the layer's mixed in where "
        "these are few; of the routed tokens alone; or of all tokens for every expert.",
    )
    allow_unread: bool = option(
        False,
        "Write experts in a layout that no known client reads, such as int8, for quantkit eval and generate.",
    )
    allow_requantize: bool = option(
        False, "Quantize a checkpoint that is quantized already; the errors of both add up."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Precision of the forward passes: the checkpoint's own where the hardware has it, else float32.",
    )
    device: str = option("auto", "cpu, cuda, cuda:N or mps. (auto: cuda where there is one)")
    batch_size: int | None = option(None, "Sequences per forward pass. (default: about 4096 tokens)")
    sequential: Literal["auto", "suspend", "repeat"] = option(
        "auto",
        "Gather statistics in one forward pass suspended at each site (faster), or repeat the pass up to "
        "each site (less memory). auto looks at the memory.",
    )
    states: Literal["auto", "device", "host", "disk"] = option(
        "auto",
        "Where the hidden states of the calibration tokens wait: on a GPU in its memory or in the host's, "
        "copied ahead; or in a file beside the output. auto looks at the memory; the output is the same.",
    )
    max_memory: str | None = option(
        None,
        "What the whole process may take of the host's memory, such as 6GB. (default: what is free, in a "
        "container or under ulimit what these leave)",
    )
    threads: int | None = option(None, "CPU threads. (default: all cores)")
    max_shard_gb: float = option(5.0, "Largest weight file, in GB.")
