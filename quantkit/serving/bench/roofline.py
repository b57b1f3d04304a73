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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    found = [_fitted("sum", *_line(times), times)]
    ranked = sorted(times)
    for cut in range(1, len(ranked)):
        floor, slope = _mean(ranked[:cut], lambda batch: 1.0), _mean(ranked[cut:], float)
        found.append(_fitted("max", floor, slope, times))
    possible = [one for one in found if one.floor > 0 and one.slope > 0]
    return min(possible, key=lambda one: one.error, default=None)


def where(fitted: Fit, times: Times) -> str:
    """`within` the batches that were measured, `below` them or `beyond`: then b* is extrapolated."""
    batches = [batch for batch, _ in times]
    best = fitted.optimal_batch
    return "below" if best < min(batches) else "beyond" if best > max(batches) else "within"


def _line(times: Times) -> tuple[float, float]:
    """a and c of `a + c·b` with the least squared relative error: every row is divided by its time."""
    rows = [(1 / seconds, batch / seconds) for batch, seconds in times]
    aa, ab, bb = sum(p * p for p, _ in rows), sum(p * q for p, q in rows), sum(q * q for _, q in rows)
    a, b = sum(p for p, _ in rows), sum(q for _, q in rows)
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant


def _mean(times: Times, basis: Callable[[float], float]) -> float:
    """k of `k · basis(b)` with the least squared relative error."""
    shares = [basis(batch) / seconds for batch, seconds in times]
    return sum(shares) / sum(share * share for share in shares)


def _fitted(shape: str, floor: float, slope: float, times: Times) -> Fit:
    trial = Fit(shape, floor, slope, 0.0)
    errors = [(trial.seconds(batch) / seconds - 1) ** 2 for batch, seconds in times]
    return Fit(shape, floor, slope, (sum(errors) / len(errors)) ** 0.5)
