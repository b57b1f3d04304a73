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
    """Ask nothing yet; the program loads the file for every test."""
    return Program(job)


class Program:
    """Called for every run."""

    def __init__(self, job: Job):
        self._job = job
        self.facts = Facts(PROGRAM, "", job.subject.weight_bytes)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        if len(prompts) > 1:
            raise QuantkitError(
                "llama-bench measures one sequence at a time", "pip install xllamacpp", UNSUPPORTED
            )
        prompt = len(prompts[0])
        prefill = self._ask("-p", prompt, "-n", 0)
        decode = self._ask("-p", 0, "-n", tokens - 1, "-d", prompt)
        cache = self._job.subject.cache_bytes(Point(1, prompt), tokens, Fraction(2))
        return Timing(prompt, prefill, tokens - 1, decode, kv_bytes=cache)

    def _ask(self, *arguments: Any) -> float:
        """Seconds of one test, made once. Raises QuantkitError with what the program said last."""
        settings = self._job.settings
        layers = ["-ngl", 0] if settings.device == "cpu" else []
        command = [shutil.which(PROGRAM), "-m", self._job.subject.path, "-t", settings.threads, *layers]
        command += [*arguments, "-r", 1, "-o", "json"]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, errors="replace")
        try:
            return next(row["samples_ns"][0] / 1e9 for row in json.loads(done.stdout) if row["samples_ns"])
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise QuantkitError(f"llama-bench failed ({done.returncode}): {said}") from error
