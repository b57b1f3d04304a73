"""Prefill and decode under each attention implementation, at prompt lengths from short to long.

One loaded model is switched between implementations, which take turns at every repeat. A disturbance of the
machine then slows all of them, so ratios hold where seconds drift. The kernel that ran is read off torch's
dispatcher: `sdpa` is a name for several, and torch picks one by dtype, mask, head size and device.
"""

import gc
import itertools
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.capacity.kv_cache import attention_scores
from quantkit.errors import USAGE, name_all, require
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import free_memory, is_accelerator
from quantkit.quantize.progress import SILENT, Progress
from quantkit.serving.bench import prompts as random_prompts
from quantkit.serving.bench.attempts import Attempts
from quantkit.serving.bench.memory import Meter
from quantkit.serving.bench.settings import AttentionSettings
from quantkit.serving.engines import transformers as engine
from quantkit.tables import megabytes

SCHEMA = "quantkit.bench-attention/2"
LENGTHS = (256, 512, 1024, 2048, 4096)  # default prompt lengths; a CPU takes minutes
WRITTEN_OUT = 6  # maximum of score matrices in memory: product, masked, softmax in float32 (counts twice)
SHORT = 16  # tokens of the first, unmeasured run
# A kernel that is not installed, or not for this dtype, device or length, or that runs out of memory.
FAILURES = (ImportError, RuntimeError, ValueError)
FUSED = re.compile(r"attention|^(vllm_)?flash_attn")  # operators of fused attention
SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
Prompts = Sequence[Sequence[int]]


def plan(settings: AttentionSettings, context: int | None) -> list[int]:
    """Return the prompt lengths to measure, the shortest first.

    Raises QuantkitError (exit code 2) where prompt and new tokens exceed the model's context.
    """
    longest = (context or 1 << 30) - settings.tokens
    if settings.prompt_tokens is None:
        return [length for length in LENGTHS if length <= longest] or [max(1, longest)]
    lengths = list(settings.numbers("prompt_tokens"))
    too_long = [str(length) for length in lengths if length > longest]
    what = f"prompts of {name_all(too_long)} and {settings.tokens} new tokens"
    message = f"{what} are longer than the model's context of {context}"
    require(not too_long, message, f"choose --prompt-tokens {max(1, longest)} or less", USAGE)
    return lengths


def measure(
    checkpoint: Checkpoint, settings: AttentionSettings, progress: Progress = SILENT
) -> dict[str, Any]:
    """Load the model, run every implementation at every length; return JSON (bench-attention-2.json).

    Raises QuantkitError where lengths exceed the model's context (exit code 2), the model does not fit the
    memory (5), or no implementation runs (4). If only some fail, their rows give the reason.
    """
    names, lengths = settings.names("implementations"), plan(settings, checkpoint.context)
    progress.phase(f"loading {checkpoint.source}")
    model, facts = engine.load(checkpoint, settings, lengths[-1] + settings.tokens)
    gc.collect()
    attempts, vocab_size = Attempts(names, FAILURES, model.device), checkpoint.text_config.vocab_size

    def prompts(length: int) -> Prompts:
        return random_prompts.draw([length] * settings.batch, vocab_size, f"{settings.seed} {length}")

    short = prompts(min(SHORT, lengths[0]))
    kernels = attempts.turn(lambda name: _kernel(model, name, short))
    rows: list[dict[str, Any]] = []
    for index, length in enumerate(lengths):  # long prompts take long
        progress.counting("measuring, in prompt tokens", sum(lengths[:index]), sum(lengths))
        rows += _rows(model, attempts, prompts(length), settings, kernels)
    if all(row["refused"] for row in rows):
        raise attempts.failure("attention", "eager runs everywhere")
    return {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": settings.record(),
        "dtype": facts.dtype,
        "device": facts.device,
        "context": checkpoint.context,
        "weights": facts.weights,
        "weight_bytes": facts.weight_bytes,
        "rows": rows,
    }


def _kernel(model: nn.Module, name: str, prompts: Prompts) -> str:
    """Return the name of the kernel that runs. The first run, in which libraries allocate their lasting
    buffers, is not observed."""
    _seconds(model, name, prompts)
    with Operators() as operators:
        _seconds(model, name, prompts)
    ran = getattr(model.config.get_text_config(), "_attn_implementation", name)
    return describe(operators.names) + (f"; transformers took {ran} instead" if ran != name else "")


def _rows(
    model: nn.Module,
    attempts: Attempts,
    prompts: Prompts,
    settings: AttentionSettings,
    kernels: dict[str, str],
) -> list[dict[str, Any]]:
    """Measure the implementations in turn with prompts of one length; return a row for each."""
    refused, steps, length = attempts.refused, 1 + settings.tokens, len(prompts[0])
    if "eager" in attempts.names and (too_large := _too_large(model, len(prompts), length)):
        refused.setdefault("eager", too_large)
    peaks = attempts.turn(lambda name: allocated(model.device, lambda: _seconds(model, name, prompts)))
    repeats = range(settings.repeats)
    turns = [attempts.turn(lambda name: _seconds(model, name, prompts, steps)) for _ in repeats]
    rows = []
    for name in attempts.names:
        ran = [] if name in refused else [turn[name] for turn in turns]
        row = {"attention": name, "length": length, "seconds": [tokens[0] for tokens in ran]}
        row["step_seconds"] = [statistics.median(tokens[1:]) for tokens in ran]
        row["prefill_bytes"] = peaks[name] if ran else None
        rows.append(row | {"refused": refused.get(name, ""), "kernel": kernels.get(name, "")})
    return rows


def _seconds(model: nn.Module, name: str, prompts: Prompts, tokens: int = 1) -> list[float]:
    """Return the seconds of each new token under an implementation. The first is the prefill, which as in
    serving computes logits of the last token only: all take more memory than attention does."""
    model.set_attn_implementation(name)
    return engine.continue_batch(model, prompts, tokens)[1]


def _too_large(model: nn.Module, batch: int, length: int) -> str:
    """Return why eager needs too much memory, or "". On a CPU the system would kill the process."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1) or 1
    scores = attention_scores(heads, length, model.dtype.itemsize) * batch
    need, free = WRITTEN_OUT * scores, free_memory(model.device)
    short = f"scores of one layer take {megabytes(need)}, {megabytes(free)} of memory are free"
    return short if need > free else ""


def allocated(device: torch.device, work: Callable[[], Any]) -> int | None:
    """Return the peak of bytes that `work` allocates; None where the device does not count them.

    An accelerator's allocator counts them; on the CPU, torch's profiler lists every allocation. Both are
    exact. Bytes allocated before the call are not included.
    """
    gc.collect()
    if is_accelerator(device):
        meter = Meter(device)
        meter.reset()
        before = meter.peak()
        work()
        return None if before is None else meter.peak() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


class Operators(TorchDispatchMode):
    """Context that collects the names of the operators that run, such as aten::_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name if hasattr(func, "_schema") else str(func))
        return func(*args, **(kwargs or {}))


def describe(operators: Collection[str]) -> str:
    """Return the names of the fused attention operators, or a text that says whether scores `[heads, N, N]`
    were written out. Fused operators have priority, since a router of experts also runs a softmax."""
    if fused := sorted(name for name in operators if FUSED.search(name)):
        return ", ".join(fused)
    if SOFTMAX.intersection(operators):
        return "scores written out (matmul, softmax, matmul)"
    return "not known: torch's dispatcher showed no attention"
