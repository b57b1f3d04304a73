"""A few numbers instead of many: what is in the middle, what is seldom exceeded, how far they scatter.

The median and the median absolute deviation (MAD) forget a run that another program disturbed, where mean
and standard deviation would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest of the sorted values, linearly: numpy's default."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """count, median, p90, min, max; mad: the median distance from the median, as a share of it."""
    middle = statistics.median(values)
    scatter = statistics.median(abs(value - middle) for value in values)
    return {
        "count": len(values),
        "median": middle,
        "p90": quantile(values, 0.9),
        "min": min(values),
        "max": max(values),
        "mad": scatter / middle if middle else 0.0,
    }
