"""The engines that are measured.

A runner has `device`, torch's (None where torch does not compute), `dtype`, the precision of decoded weights
and of the cache, and `packed`, whether weights should stay quantized. `load` loads the model, and `run` times
one batch.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import transformers

from quantkit.capacity.source import cache_bytes
from quantkit.errors import require
from quantkit.evaluation.generate import shared_dtype
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.serving.bench.measure import Subject
from quantkit.serving.bench.settings import BenchSettings, Workload
from quantkit.serving.engines import EngineFacts, llamacpp
from quantkit.serving.engines import transformers as engine
from quantkit.serving.engines.choose import installed


@dataclass(frozen=True)
class Timing:
    """One run: all prompts prefilled, then exactly the requested number of tokens decoded, greedily.

    prefill_seconds: time until every sequence had its first token. decode_tokens: later tokens of all
    sequences together; decode_seconds: their time. step_seconds: times from one token of a sequence to its
    next. kv_bytes: bytes of keys and values, None if unknown.
    """

    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    step_seconds: Sequence[float]
    kv_bytes: int | None


class TransformersRunner:
    """transformers' own `generate`, with the time of each token."""

    def __init__(self, subject: Subject, settings: BenchSettings):
        """Import the layout's client and the model family's code, so that later timings do not include it."""
        self._settings = settings
        self._checkpoint = open_checkpoint(str(subject.path), trust_remote_code=settings.trust_remote_code)
        self.device = choose_device(settings.device)
        dtype = shared_dtype(settings.dtype, self._checkpoint, self.device)
        self.dtype = str(dtype).removeprefix("torch.")
        self.packed = self._checkpoint.quantized and subject.path.is_dir() and not settings.decoded
        for package in engine.client_of(self._checkpoint)["needs"] if self.packed else ():
            if installed(package):
                import_module(package.replace("-", "_"))
        transformers.AutoModelForCausalLM._model_mapping.get(type(self._checkpoint.config), None)

    def load(self, workloads: Sequence[Workload]) -> EngineFacts:
        """Load the model. Raises QuantkitError as `engines.transformers.load` does."""
        settings = self._settings
        longest = max(work.batch * (work.prompt + settings.tokens) for work in workloads)
        self._model, facts = engine.load(self._checkpoint, settings, longest, settings.decoded)
        return facts

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        """Continue prompts of equal length by `tokens` tokens each."""
        _, (prefill, *steps), cache = engine.continue_batch(self._model, prompts, tokens)
        return Timing(prefill, len(prompts) * len(steps), sum(steps), steps, engine.cache_bytes(cache))


class LlamaCppRunner:
    """llama.cpp: one request with all prompts, tokens timed as they arrive.

    The file is loaded again for every workload, since each needs a context of another size."""

    device, dtype, packed = None, "float16", True  # float16: llama.cpp's default for the cache

    def __init__(self, subject: Subject, settings: BenchSettings):
        import_module(llamacpp.PACKAGE)  # so that later timings do not include it
        self._subject, self._settings = subject, settings
        self._session: llamacpp.LlamaCppServer | None = None
        self._workload: Workload | None = None

    def load(self, workloads: Sequence[Workload]) -> EngineFacts:
        """Load the file for the first workload."""
        self._open(workloads[0])
        version, weight_bytes = llamacpp.version(), self._subject.size["weight_bytes"]
        return EngineFacts(version, weight_bytes, "llama.cpp ggml", packed=True, dtype="float32")

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        """Continue prompts of equal length by `tokens` tokens each."""
        work = Workload(len(prompts), len(prompts[0]))
        self._open(work)
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        began = time.perf_counter()

        def receive(chunk: Mapping[str, Any]) -> None:
            for choice in chunk.get("choices", ()):
                count = int(chunk["timings"]["predicted_n"])
                arrivals[choice["index"]].append((time.perf_counter(), count))

        request = {"prompt": [list(prompt) for prompt in prompts], "n_predict": tokens, "ignore_eos": True}
        self._session.stream(request | {"cache_prompt": False, "timings_per_token": True}, receive)
        padded = llamacpp.padded(work.prompt + tokens)  # allocated for every sequence in advance
        kv_bytes = cache_bytes(self._subject.path, padded, self.dtype)
        return arrival_timing(began, arrivals, work.batch * tokens, kv_bytes and work.batch * kv_bytes)

    def _open(self, work: Workload) -> None:
        """Load the file with a context for `work`, unless it is already loaded with that context."""
        if self._workload == work:
            return
        self._session = None  # frees the previous session
        settings = llamacpp.parameters(
            self._subject.path,
            work.prompt + self._settings.tokens,
            slots=work.batch,
            threads=self._settings.cores,
            kv_dtype=self.dtype,
            device=choose_device(self._settings.device).type,
        )
        settings.n_batch = max(settings.n_batch, work.batch * work.prompt)  # all prompts in one batch
        settings.cache_ram_mib, settings.cache_idle_slots = 0, False  # else prompts of earlier runs are kept
        self._session, self._workload = llamacpp.LlamaCppServer(settings), work


Runner = TransformersRunner | LlamaCppRunner
RUNNERS = {"transformers": TransformersRunner, "llama.cpp": LlamaCppRunner}


def arrival_timing(
    began: float, arrivals: Sequence[Sequence[tuple[float, int]]], tokens: int, kv_bytes: int | None
) -> Timing:
    """Return the timing of a run. arrivals: a list of (time, number of tokens so far) per sequence. tokens:
    new tokens of all sequences together.

    The prefill ends when the last sequence has its first token; only tokens after that moment are counted as
    decoded. Raises QuantkitError if there are none.
    """
    first = max(sequence[0][0] for sequence in arrivals)
    last = max(sequence[-1][0] for sequence in arrivals)
    early = sum(max(count for moment, count in sequence if moment <= first) for sequence in arrivals)
    require(last != first, "llama.cpp sent all tokens at once: there is no step to time", "add --tokens")
    steps = [
        (after - before) / (count - earlier)  # a character of several tokens arrives at once
        for (before, earlier), (after, count) in zip(arrivals[0], arrivals[0][1:], strict=False)
        for _ in range(count - earlier)
    ]
    return Timing(first - began, tokens - early, last - first, steps, kv_bytes)
