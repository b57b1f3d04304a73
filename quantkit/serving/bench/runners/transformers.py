"""transformers: its own `generate`, whose steps are timed as each token appears."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

from quantkit.models.files.checkpoint import Checkpoint
from quantkit.models.files.open import open_checkpoint
from quantkit.models.machine.device import choose_device, choose_dtype, give_back, synchronize
from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.subjects import Job
from quantkit.serving.engines import transformers as engine

AT_ONCE = 1 << 40  # all there are
STORED = {torch.bfloat16: "BF16", torch.float16: "F16"}


def prepare(job: Job) -> torch.device:
    """Threads, the device, and the family's own code, which transformers imports when it is asked for."""
    torch.set_num_threads(job.settings.threads)
    device = choose_device(job.settings.device)
    if not job.settings.decoded:
        engine.import_client(job.subject.stored)
    checkpoint = _open(job)
    transformers.AutoModelForCausalLM._model_mapping.get(type(checkpoint.config), None)
    return device


def precision(checkpoint: Checkpoint, asked: str, device: torch.device) -> torch.dtype:
    """That of the checkpoint where the hardware has it."""
    return getattr(torch, choose_dtype(asked, STORED.get(checkpoint.config.dtype, "F32"), device))


def value_bytes(job: Job, device: torch.device) -> int:
    """Bytes of a decoded weight and of a value in the cache, in the precision that will compute."""
    return precision(_open(job), job.settings.dtype, device).itemsize


def start(job: Job) -> Generation:
    """Load the model. Raises QuantkitError as `engines.transformers.load` does."""
    checkpoint, device = _open(job), choose_device(job.settings.device)
    dtype = precision(checkpoint, job.settings.dtype, device)
    longest = max(point.batch * (point.prompt + job.settings.tokens) for point in job.points)
    return Generation(
        engine.load(checkpoint, dtype, device, longest, decoded=job.settings.decoded), device, dtype
    )


def _open(job: Job) -> Checkpoint:
    return open_checkpoint(str(job.subject.path), trust_remote_code=job.settings.trust_remote_code)


class Generation:
    """A model of transformers that generates."""

    def __init__(self, loaded: engine.Loaded, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.facts = Facts(
            engine="transformers",
            version=engine.version(),
            kernels=loaded.kernels,
            packed=loaded.packed,
            note=loaded.note,
            dtype=str(dtype).removeprefix("torch."),
            attention=loaded.attention,
            weight_bytes=loaded.weight_bytes,
        )
        self._model = loaded.model
        # nothing that a checkpoint recommends, its end of text least of all: lengths are exact
        self._model.generation_config = transformers.GenerationConfig()

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        ids = torch.tensor(prompts).to(self.device)
        clock = _Clock(self.device)
        settings = transformers.GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        with torch.no_grad():
            clock.start()
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                stopping_criteria=[clock],
            )
        steps = [after - before for before, after in zip(clock.times[1:-1], clock.times[2:], strict=True)]
        return Timing(
            prefill_tokens=ids.numel(),
            prefill_seconds=clock.times[1] - clock.times[0],
            decode_tokens=ids.shape[0] * len(steps),
            decode_seconds=sum(steps),
            step_seconds=steps,
            kv_bytes=cache_bytes(out.past_key_values),
        )

    def close(self) -> None:
        del self._model
        gc.collect()
        give_back(self.device)


class _Clock(transformers.StoppingCriteria):
    """Notes when each token is there, and stops nothing."""

    def __init__(self, device: torch.device):
        self.times: list[float] = []
        self._device = device

    def start(self) -> None:
        synchronize(self._device)
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        synchronize(self._device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def cache_bytes(cache: Any) -> int | None:
    """Of all tensors of a cache, whatever family's it is; None where there is none."""
    if cache is None:
        return None
    found = {id(tensor): tensor for tensor in _tensors(cache, 0)}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 5:
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        inner = inner or getattr(value, "__dict__", {}).values()
        for one in inner:
            yield from _tensors(one, depth + 1)
