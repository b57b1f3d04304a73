"""The roofline over what was measured, and b*, the batch from which more sequences cost time.

Predicted (Williams, Waterman, Patterson 2009, as capacity/roofline.py has it): a step of b sequences reads
the weights once and every sequence's keys and values, and multiplies each active weight b times:

    t(b) = max((weights + b · cache) / bandwidth, 2 · active · b / FLOPS)

b* is where reading the weights and computing with them take equally long, the figure of `quantkit plan`.

Measured: times of a step are fitted by a floor `a`, which is paid whatever the batch, and a cost `c` of each
sequence. Whether the two overlap (`max(a, c·b)`, as on the roofline) or add up (`a + c·b`, as where a program
first reads and then computes), their asymptotes cross at `b* = a / c`: up to there the floor is most of the
step, beyond it the sequences are. Both shapes are fitted, in relative error, since times span decades; the
nearer one is kept. Three batches are the least that can tell the two shapes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantkit.capacity import roofline

FEWEST = 3  # batches of a fit
Times = Sequence[tuple[int, float]]  # sequences, seconds of a step


@dataclass(frozen=True)
class Roof:
    """What bounds a step. bytes of the weights that it reads and of one sequence's keys and values; active
    weights; bytes and FLOPS a second."""

    weight_bytes: float
    cache_bytes: float
    active: int
    bandwidth: float
    flops: float

    def seconds(self, batch: float) -> float:
        """Least time of a step."""
        reading = (self.weight_bytes + batch * self.cache_bytes) / self.bandwidth
        return max(reading, 2 * self.active * batch / self.flops)

    @property
    def optimal_batch(self) -> float:
        """b*, without the cache, as plan has it."""
        return roofline.optimal_batch(self.flops, self.bandwidth, self.weight_bytes / self.active)


@dataclass(frozen=True)
class Fit:
    """shape: `max` or `sum`. floor and slope in seconds. error: root mean square, relative."""

    shape: str
    floor: float
    slope: float
    error: float

    def seconds(self, batch: float) -> float:
        """Of a step."""
        each = self.slope * batch
        return max(self.floor, each) if self.shape == "max" else self.floor + each

    @property
    def optimal_batch(self) -> float:
        """b* = floor / slope."""
        return self.floor / self.slope


def fit(times: Times) -> Fit | None:
    """The nearer of both shapes; None for too few batches, or where more sequences cost nothing yet."""
    if len({batch for batch, _ in times}) < FEWEST:
        return None
    batches, seconds = np.asarray(sorted(times), dtype=float).T
    every = np.ones_like(batches)
    designs = [("sum", np.stack([every, batches], 1))]
    for cut in range(1, len(batches)):  # up to there the floor alone counts, beyond it the slope
        flat = np.arange(len(batches)) < cut
        designs.append(("max", np.stack([every * flat, batches * ~flat], 1)))
    found = []
    for shape, design in designs:  # each row divided by its time: the least squared relative error
        floor, slope = np.linalg.lstsq(design / seconds[:, None], every)[0].tolist()
        trial = Fit(shape, floor, slope, 0.0)
        errors = [trial.seconds(batch) / took - 1 for batch, took in times]
        if floor > 0 and slope > 0:
            found.append(replace(trial, error=float(np.sqrt(np.mean(np.square(errors))))))
    return min(found, key=lambda one: one.error, default=None)


def where(fitted: Fit, times: Times) -> str:
    """`within` the batches that were measured, `below` them or `beyond`: then b* is extrapolated."""
    batches = [batch for batch, _ in times]
    best = fitted.optimal_batch
    return "below" if best < min(batches) else "beyond" if best > max(batches) else "within"
