"""The least time of a decoding step, and b*, the batch size above which more sequences cost time.

Predicted (Williams, Waterman, Patterson 2009, see capacity/devices.py): a step of b sequences reads the
weights once and every sequence's keys and values, and multiplies each active weight b times:

    t(b) = max((weights + b · cache) / bandwidth, 2 · active · b / FLOPS)

b* is the batch at which reading the weights and computing with them take equally long.

Measured: step times are fitted by `a + c·b`: a fixed time and a time per sequence. The fit minimizes relative
errors, since times span decades. At `b* = a / c` a step takes twice its fixed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.capacity import devices

FEWEST_BATCHES = 3  # batch sizes that a fit needs


@dataclass(frozen=True)
class Roof:
    """Numbers that bound a step. weight_bytes: weights that a step reads. cache_bytes: keys and values of one
    sequence. active: weights used per token. bandwidth: bytes a second. flops: operations a second."""

    weight_bytes: float
    cache_bytes: float
    active: int
    bandwidth: float
    flops: float

    def seconds(self, batch: float) -> float:
        """Return the least time of a step with `batch` sequences."""
        reading = (self.weight_bytes + batch * self.cache_bytes) / self.bandwidth
        return max(reading, 2 * self.active * batch / self.flops)

    @property
    def optimal_batch(self) -> float:
        """b*, without the cache, as `quantkit plan` computes it."""
        return devices.optimal_batch(self.flops, self.bandwidth, self.weight_bytes / self.active)


def fit(times: Sequence[tuple[int, float]]) -> dict[str, float] | None:
    """Fit times, given as (batch, seconds of a step); return floor (a), slope (c) and optimal_batch (b*).

    Returns None for fewer than FEWEST_BATCHES batch sizes, or if floor or slope is not positive.
    """
    if len({batch for batch, _ in times}) < FEWEST_BATCHES:
        return None
    batches, seconds = np.asarray(times, dtype=float).T
    slope, floor = np.polyfit(batches, seconds, 1, w=1 / seconds).tolist()
    if slope <= 0 or floor <= 0:
        return None
    return {"floor": floor, "slope": slope, "optimal_batch": floor / slope}
