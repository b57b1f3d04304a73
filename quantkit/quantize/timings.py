"""Wall-clock seconds by stage, kept apart from everything that must be equal in every run."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.models.machine.device import synchronize


@dataclass
class Timings:
    """`with timings("solve"):` adds the wall-clock seconds of the context to `seconds["solve"]`.

    An accelerator works asynchronously: its remaining work is waited for, and counted, at the end of the next
    stage with `wait`. notes: deviations of the job from its plan.
    """

    device: torch.device = torch.device("cpu")
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str, wait: bool = True) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if wait:
            synchronize(self.device)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def waiting(self, stage: str, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the same batches; the seconds spent waiting for each are added to the stage."""
        source = iter(batches)
        while True:
            with self(stage, wait=False):
                batch = next(source, None)
            if batch is None:
                return
            yield batch
