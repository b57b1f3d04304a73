"""Wall seconds by stage, kept apart from everything that must come out the same twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Timings:
    """`with timings("solve"):` adds the block's wall seconds to `seconds["solve"]`."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
