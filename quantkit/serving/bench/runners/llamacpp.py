"""llama.cpp through the xllamacpp wheel: one request with all prompts, tokens timed as they arrive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from quantkit.errors import require
from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.settings import Point
from quantkit.serving.bench.subjects import Job
from quantkit.serving.engines import llamacpp

PAD = 256  # llama.cpp rounds a sequence's cache up to a multiple of this
KV_DTYPE, KV_BYTES = "float16", Fraction(2)  # llama.cpp's default


def prepare(job: Job) -> tuple[None, int]:
    """Import the library. torch does not compute here."""
    llamacpp.library()
    return None, int(KV_BYTES)


class Runner:
    """A GGUF file. It is loaded again for every point, since each needs a context of another size."""

    def __init__(self, job: Job):
        self._job = job
        self._session: llamacpp.Session | None = None
        self._point: Point | None = None
        self.facts = Facts(llamacpp.version() or "", job.subject.weight_bytes)
        self._open(job.points[0])

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        point = Point(len(prompts), len(prompts[0]))
        self._open(point)
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        began = time.perf_counter()

        def receive(chunk: Mapping[str, Any]) -> None:
            for choice in chunk.get("choices", ()):
                counted = int(chunk["timings"]["predicted_n"])
                arrivals[choice["index"]].append((time.perf_counter(), counted))

        request = {"prompt": [list(prompt) for prompt in prompts], "n_predict": tokens, "ignore_eos": True}
        self._session.stream(request | {"cache_prompt": False, "timings_per_token": True}, receive)
        padded = -(-(point.prompt + tokens) // PAD) * PAD  # allocated for every sequence in advance
        kv = self._job.subject.cache_bytes(Point(point.batch, padded), 0, KV_BYTES)
        return timing(began, arrivals, point, tokens, kv)

    def _open(self, point: Point) -> None:
        """Load the file with a context for `point`, unless it is already loaded with that context."""
        if self._point == point:
            return
        self._session = None  # frees the previous session
        settings = llamacpp.parameters(
            self._job.subject.path,
            point.prompt + self._job.settings.tokens,
            slots=point.batch,
            threads=self._job.settings.cores,
            kv_dtype=KV_DTYPE,
            device=self._job.settings.device,
        )
        settings.n_batch = max(settings.n_batch, point.batch * point.prompt)  # all prompts in one batch
        settings.cache_ram_mib, settings.cache_idle_slots = 0, False  # else prompts of earlier runs are kept
        self._session, self._point = llamacpp.Session(settings), point


def timing(
    began: float, arrivals: Sequence[Sequence[tuple[float, int]]], point: Point, tokens: int, kv: Any
) -> Timing:
    """Return the timing of a run. arrivals: a list of (time, number of tokens so far) per sequence.

    The prefill ends when the last sequence has its first token; only tokens after that moment are counted as
    decoded. Raises QuantkitError if there are none.
    """
    first = max(rows[0][0] for rows in arrivals)
    last = max(rows[-1][0] for rows in arrivals)
    early = sum(max(count for moment, count in rows if moment <= first) for rows in arrivals)
    require(last != first, "llama.cpp sent all tokens at once: there is no step to time", "add --tokens")
    rows = arrivals[0]
    steps = [
        (after - before) / (count - counted)  # a character of several tokens arrives at once
        for (before, counted), (after, count) in zip(rows, rows[1:], strict=False)
        for _ in range(count - counted)
    ]
    return Timing(
        prefill_tokens=point.batch * point.prompt,
        prefill_seconds=first - began,
        decode_tokens=point.batch * tokens - early,
        decode_seconds=last - first,
        step_seconds=steps,
        kv_bytes=kv,
    )
