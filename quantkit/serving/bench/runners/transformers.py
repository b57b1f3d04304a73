"""transformers' own `generate`, with the time of each token."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch
import transformers

from quantkit.evaluation.generate import shared_dtype
from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device
from quantkit.serving.bench import generation
from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.subjects import Job
from quantkit.serving.engines import transformers as engine
from quantkit.serving.engines.choose import installed


def prepare(job: Job) -> tuple[torch.device, int]:
    """Import the layout's client and the model family's code, so that later timings do not include it."""
    checkpoint, dtype, device = _open(job)
    packed = job.subject.stored and checkpoint.folder.is_dir() and not job.settings.decoded
    for package in engine.client_of(checkpoint)["needs"] if packed else ():
        if installed(package):
            import_module(package.replace("-", "_"))
    transformers.AutoModelForCausalLM._model_mapping.get(type(checkpoint.config), None)
    return device, dtype.itemsize


def _open(job: Job) -> tuple[Checkpoint, torch.dtype, torch.device]:
    """Return the checkpoint, the dtype to compute in on this hardware, and the device."""
    checkpoint = open_checkpoint(str(job.subject.path), trust_remote_code=job.settings.trust_remote_code)
    device = choose_device(job.settings.device)
    return checkpoint, shared_dtype(job.settings.dtype, checkpoint, device), device


class Runner:
    """A model loaded by transformers."""

    def __init__(self, job: Job):
        """Raises QuantkitError as `engines.transformers.load` does."""
        checkpoint, dtype, device = _open(job)
        longest = max(point.batch * (point.prompt + job.settings.tokens) for point in job.points)
        loaded = engine.load(checkpoint, dtype, device, longest, decoded=job.settings.decoded)
        self._model, self._clock = loaded.model, engine.clock_of(device)
        self.facts = Facts(
            version=transformers.__version__,
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
