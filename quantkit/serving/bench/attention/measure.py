"""Prefill and decode under each attention implementation, one loaded model, lengths from short to long.

One model is loaded and switched between implementations, and they take turns at every repeat: what else the
machine does meets all of them, so that ratios hold where seconds drift.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from quantkit.capacity.kv_cache import attention_scores
from quantkit.errors import UNSUPPORTED, QuantkitError, first_line
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.machine.device import free_memory, give_back, is_accelerator, synchronize
from quantkit.quantize.progress import Progress
from quantkit.serving.bench.attention.fit import fit
from quantkit.serving.bench.attention.kernels import Operators, describe
from quantkit.serving.bench.attention.settings import Settings
from quantkit.serving.bench.machine import clock_of
from quantkit.serving.engines import transformers as engine
from quantkit.tables import megabytes

SCHEMA = "quantkit.bench-attention/1"
WRITTEN_OUT = 6  # score matrices at once at most: product, mask added, softmax in float32 (twice the bytes)
REASON = 180  # characters of why one is refused
SHORT = 16  # tokens of the first, unmeasured run, or as few as the shortest prompt has
# Why a kernel does not run: not installed, not for this dtype or device or length, out of memory.
REFUSALS = (ImportError, RuntimeError, ValueError)


@dataclass
class Row:
    """One implementation at one length. kernel: what ran. seconds: of the prefill, a value a repeat;
    step_seconds: of a decoded token, the median of each repeat. prefill_bytes, decode_bytes: peaks above the
    loaded model, None where no peak is told. refused: why there are none of these."""

    attention: str
    length: int
    kernel: str = ""
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    prefill_bytes: int | None = None
    decode_bytes: int | None = None
    refused: str = ""


def measure(
    checkpoint: Checkpoint,
    settings: Settings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load the model and run every implementation at every length: the versioned JSON, which
    bench-attention-1.json describes. Bounded by `settings.limit` a prefill.

    Raises QuantkitError when lengths are beyond the model's context (exit code 2), or it does not fit the
    memory (5), or none of the implementations runs (4). One that does not run is a row.
    """
    progress = progress or Progress()
    settings.check()
    lengths = settings.plan(checkpoint.context)
    progress.phase(f"loading {checkpoint.source}")
    loaded = engine.load(checkpoint, dtype, device, lengths[-1] + settings.steps)
    gc.collect()
    bench = _Bench(checkpoint, loaded.model, settings, device)
    bench.warm_up(min(SHORT, lengths[0]))
    rows: list[Row] = []
    for place, length in enumerate(lengths):  # long prompts take long
        progress.counting("measuring, in prompt tokens", sum(lengths[:place]), sum(lengths))
        rows += bench.at(length)
    if all(row.refused for row in rows):
        said = "; ".join(f"{name}: {reason}" for name, reason in bench.refused.items())
        raise QuantkitError(f"no attention ran: {said}", "eager runs everywhere", UNSUPPORTED)
    fits = {}
    for name in settings.implementations:
        told = [
            (row.length, row.prefill_bytes) for row in rows if row.attention == name and row.prefill_bytes
        ]
        if found := fit(told, bench.heads, dtype.itemsize, settings.batch):
            fits[name] = found
    return {
        "schema": SCHEMA,
        "model": checkpoint.source,
        "settings": asdict(settings),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "context": checkpoint.context,
        "weights": loaded.kernels + (f"; {loaded.note}" if loaded.note else ""),
        "weight_bytes": loaded.weight_bytes,
        "heads": bench.heads,
        "memory": _counted_by(device),
        "rows": [asdict(row) for row in rows],
        "fits": fits,
    }


class _Bench:
    """The loaded model, and which implementations have been refused so far, with the reason."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, settings: Settings, device: torch.device):
        self.checkpoint, self.model, self.settings, self.device = checkpoint, model, settings, device
        self.heads = getattr(checkpoint.text_config, "num_attention_heads", 1) or 1
        self.refused: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        self.last: dict[str, tuple[int, float]] = {}  # length and seconds of the prefill before
        self.clock = clock_of(device)
        self.generator = torch.Generator().manual_seed(settings.seed)
        # logits of the last token only where the model can, as in serving: all take more than attention does
        last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.few = {"logits_to_keep": 1} if last else {}

    def draw(self, length: int) -> Tensor:
        """Prompts of random tokens `[batch, length]`."""
        size, vocabulary = (self.settings.batch, length), self.checkpoint.text_config.vocab_size
        return torch.randint(vocabulary, size, generator=self.generator).to(self.device)

    def at(self, length: int) -> list[Row]:
        """Rows of all implementations at a length; they take turns."""
        ids, names = self.draw(length), self.settings.implementations
        rows = {name: Row(name, length, self.kernels.get(name, "")) for name in names}
        for name in names:
            if name not in self.refused and (reason := self._too_much(name, length)):
                self.refused[name] = reason
        for work in (self._weigh, *[self._time] * self.settings.repeats):
            for name, row in rows.items():
                self._try(name, work, ids, row)
        return [
            Row(name, length, row.kernel, refused=self.refused[name]) if name in self.refused else row
            for name, row in rows.items()
        ]

    def _try(self, name: str, work: Callable[[Tensor, Row], None], ids: Tensor, row: Row) -> None:
        """Do it, unless the implementation has been refused; note it when it is now."""
        if name in self.refused:
            return
        try:
            engine.set_attention(self.checkpoint, self.model, name)
            with torch.no_grad():
                work(ids, row)
        except QuantkitError as error:
            self.refused[name] = _reason(error.__cause__ or error)
        except REFUSALS as error:
            self.refused[name] = _reason(error)
            gc.collect()
            give_back(self.device)

    def warm_up(self, length: int) -> None:
        """A short run of each unmeasured, then the same one watched for which kernel runs."""
        for name in self.settings.implementations:
            self._try(name, self._watch, self.draw(length), Row(name, length))

    def _watch(self, ids: Tensor, row: Row) -> None:
        self._time(ids, row)
        with Operators() as seen:
            self._forward(ids)
        ran = getattr(self.model.config.get_text_config(), "_attn_implementation", row.attention)
        instead = f", for transformers took {ran}" if ran != row.attention else ""
        self.kernels[row.attention] = describe(seen.names, ran) + instead

    def _weigh(self, ids: Tensor, row: Row) -> None:
        """Note the peaks of one run. The warm-up has allocated what libraries keep."""

        def decode() -> None:
            rest = cache, token
            for _ in range(self.settings.steps):
                rest = self._forward(rest[1], rest[0])

        (cache, token), kept, row.prefill_bytes = allocations(self.device, lambda: self._forward(ids))
        _, _, most = allocations(self.device, decode)
        row.decode_bytes = None if most is None else kept + most

    def _time(self, ids: Tensor, row: Row) -> None:
        times = [self.clock()]
        cache, token = None, ids
        for _ in range(1 + self.settings.steps):
            cache, token = self._forward(token, cache)
            times.append(self.clock())
        prefill, *steps = (after - before for before, after in itertools.pairwise(times))
        row.seconds.append(prefill)
        row.step_seconds.append(statistics.median(steps))
        self.last[row.attention] = row.length, prefill

    def _forward(self, ids: Tensor, cache: Any = None) -> tuple[Any, Tensor]:
        """Cache and next token `[batch, 1]`."""
        out = self.model(ids, past_key_values=cache, use_cache=True, **self.few)
        return out.get("past_key_values"), out.logits[:, -1:].argmax(-1)

    def _too_much(self, name: str, length: int) -> str:
        """Why not to try this length: a CPU does not refuse memory, its processes are killed."""
        before, seconds = self.last.get(name, (length, 0.0))
        if (expected := seconds * (length / before) ** 2) > self.settings.limit:
            return f"would take up to {expected:.0f} s, the limit is {self.settings.limit:.0f} s"
        one = attention_scores(self.heads, length, self.model.dtype.itemsize) * self.settings.batch
        if name == "eager" and (need := WRITTEN_OUT * one) > (free := free_memory(self.device)):
            return f"scores of one layer take {megabytes(need)}, {megabytes(free)} of memory are free"
        return ""


def allocations(device: torch.device, work: Callable[[], Any]) -> tuple[Any, int, int | None]:
    """Return the result of `work`, the bytes that it leaves allocated and the most that it held at once.

    Both are counted above the start, exactly: by the allocator of a device, on the CPU by the allocation
    events of torch's profiler. The peak is None where the device does not count.
    """
    gc.collect()
    if is_accelerator(device):
        module = torch.get_device_module(device)
        if not hasattr(module, "reset_peak_memory_stats"):
            return work(), 0, None
        synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        made = work()
        synchronize(device)
        return made, module.memory_allocated(device) - before, module.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made = work()
    held = most = 0
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return made, held, most


def _counted_by(device: torch.device) -> str:
    """Return where the peaks come from, in words."""
    if not is_accelerator(device):
        return "peak of torch's allocations"
    told = hasattr(torch.get_device_module(device), "reset_peak_memory_stats")
    return "peak of the device's allocator" if told else "not told by this device"


def _reason(error: BaseException) -> str:
    """In the library's words; some first lines are a paragraph."""
    return textwrap.shorten(first_line(error), REASON, placeholder=" …")
