"""transformers: its own `generate`, timed as each token appears."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device, choose_dtype
from quantkit.serving.bench import generation
from quantkit.serving.bench.machine import clock_of
from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.subjects import Job
from quantkit.serving.engines import transformers as engine

STORED = {torch.bfloat16: "BF16", torch.float16: "F16"}


def prepare(job: Job) -> tuple[torch.device, int]:
    """Import the layout's client and the family's own code, which transformers imports on demand."""
    if not job.settings.decoded:
        engine.import_client(job.subject.stored)
    checkpoint, dtype, device = _open(job)
    transformers.AutoModelForCausalLM._model_mapping.get(type(checkpoint.config), None)
    return device, dtype.itemsize


def _open(job: Job) -> tuple[Checkpoint, torch.dtype, torch.device]:
    """Return the checkpoint, its precision on this hardware and the device."""
    checkpoint = open_checkpoint(str(job.subject.path), trust_remote_code=job.settings.trust_remote_code)
    device = choose_device(job.settings.device)
    stored = STORED.get(checkpoint.config.dtype, "F32")
    return checkpoint, getattr(torch, choose_dtype(job.settings.dtype, stored, device)), device


class Runner:
    """A model of transformers that generates."""

    def __init__(self, job: Job):
        """Raises QuantkitError as `engines.transformers.load` does."""
        checkpoint, dtype, device = _open(job)
        longest = max(point.batch * (point.prompt + job.settings.tokens) for point in job.points)
        loaded = engine.load(checkpoint, dtype, device, longest, decoded=job.settings.decoded)
        self._model, self._clock = loaded.model, clock_of(device)
        self.facts = Facts(
            version=engine.version(),
            weight_bytes=loaded.weight_bytes,
            kernels=loaded.kernels,
            packed=loaded.packed,
            note=loaded.note,
            dtype=str(dtype).removeprefix("torch."),
            attention=loaded.attention,
        )

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        _, (prefill, *steps), cache = generation.run(self._model, prompts, tokens, self._clock)
        return Timing(
            prefill_tokens=sum(map(len, prompts)),
            prefill_seconds=prefill,
            decode_tokens=len(prompts) * len(steps),
            decode_seconds=sum(steps),
            step_seconds=steps,
            kv_bytes=engine.cache_bytes(cache),
        )
