"""llama.cpp's own `llama-bench`, where it is on the PATH: one sequence, its JSON read.

Of a prompt of P tokens and T new ones it runs two tests: `-p P -n 0`, the prefill, and `-p 0 -n T-1 -d P`,
which decodes with P tokens in the cache. Times are `samples_ns`, nanoseconds of each repetition.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from quantkit.errors import UNSUPPORTED, QuantkitError
from quantkit.serving.bench.runners import Facts, Timing
from quantkit.serving.bench.settings import Point
from quantkit.serving.bench.subjects import Job

AT_ONCE = 512  # n_ubatch
PROGRAM = "llama-bench"


def prepare(job: Job) -> None:
    """Nothing to import."""


def start(job: Job) -> Program:
    """Ask nothing yet; the version is in its answers."""
    return Program(job)


class Program:
    """Called for every run."""

    def __init__(self, job: Job):
        self._job = job
        self.facts = Facts(
            engine=PROGRAM,
            version="",
            kernels="llama.cpp ggml",
            packed=True,
            note="",
            dtype="float32",
            attention=None,
            weight_bytes=job.subject.weight_bytes,
        )

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        if len(prompts) > 1:
            raise QuantkitError(
                "llama-bench measures one sequence at a time", "pip install xllamacpp", UNSUPPORTED
            )
        prompt = len(prompts[0])
        prefill = self._ask("-p", prompt, "-n", 0)
        decode = self._ask("-p", 0, "-n", tokens - 1, "-d", prompt)
        seconds = [row["samples_ns"][0] / 1e9 for row in (prefill, decode)]
        cache = self._job.subject.cache_bytes(Point(1, prompt), tokens, Fraction(2))
        return Timing(prompt, seconds[0], tokens - 1, seconds[1], (), cache)

    def _ask(self, *arguments: Any) -> dict[str, Any]:
        """One test, once: its row of the JSON. Raises QuantkitError with what the program said last."""
        path = shutil.which(PROGRAM)
        layers = ["-ngl", 0] if self._job.settings.device == "cpu" else []
        command = [path, "-m", self._job.subject.path, "-t", self._job.settings.threads, *layers, *arguments]
        done = subprocess.run(
            [*map(str, command), "-r", "1", "-o", "json"], capture_output=True, text=True, errors="replace"
        )
        try:
            rows = json.loads(done.stdout)
            return next(row for row in rows if row["samples_ns"])
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise QuantkitError(f"llama-bench failed ({done.returncode}): {said}") from error

    def close(self) -> None:
        """It has ended each time."""
