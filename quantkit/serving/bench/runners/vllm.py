"""vLLM, offline: all prompts in one `generate`, timed by vLLM's own clock of every request."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib import import_module
from typing import Any

import torch

from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.subjects import Job
from quantkit.serving.engines import vllm


def prepare(job: Job) -> tuple[Any, int]:
    """Import vLLM, which chooses the device itself."""
    if vllm.version():
        import_module("vllm")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, 4 if job.settings.dtype == "float32" else 2


class Runner:
    """vLLM's `LLM`, with room for the largest of the points. Its cache of keys and values is one block of
    memory whatever runs, so none is reported."""

    def __init__(self, job: Job):
        """Raises QuantkitError as `engines.vllm.load` does."""
        settings = job.settings
        largest = max(job.points, key=lambda point: point.batch * point.prompt)
        context = max(point.prompt for point in job.points) + settings.tokens
        sequences = max(point.batch for point in job.points)
        cache = job.subject.cache_bytes(largest, settings.tokens, Fraction(4)) or 0
        self._model = vllm.load(job.subject.path, settings.dtype, context, sequences, settings.seed, cache)
        self.facts = Facts(
            version=vllm.version() or "",
            weight_bytes=job.subject.weight_bytes,
            kernels=f"vLLM {job.subject.stored or 'dense'}",
            packed=job.subject.stored is not None,
            dtype=str(self._model.llm_engine.model_config.dtype).removeprefix("torch."),
        )

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        sampling = import_module("vllm").SamplingParams(
            temperature=0, min_tokens=tokens, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return timing(self._model.generate(requests, sampling, use_tqdm=False))


def timing(outputs: Sequence[Any]) -> Timing:
    """Return the timing from vLLM's times of all requests: scheduled, first token, last token."""
    times = [output.metrics for output in outputs]
    scheduled, first = min(one.scheduled_ts for one in times), max(one.first_token_ts for one in times)
    last = max(one.last_token_ts for one in times)
    return Timing(
        prefill_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        prefill_seconds=first - scheduled,
        decode_tokens=sum(len(output.outputs[0].token_ids) - 1 for output in outputs),
        decode_seconds=last - first,
    )
