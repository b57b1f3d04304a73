"""Memory as a function of the prompt: bytes = a + b·N + c·N², by least squares.

b is what every token leaves behind (KV cache, hidden states); c is what exists for every pair of tokens:
scores that are written out. FlashAttention (Dao et al. 2022, arXiv:2205.14135) has c = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.capacity.kv_cache import attention_scores

LEAST = 4  # lengths: three would be met exactly, whatever they are


@dataclass(frozen=True)
class Fit:
    """bytes = a + b·N + c·N². error: the standard error of c. scores: bytes·N⁻² of one layer's scores, all
    sequences of the batch; matrices: how many of them c is."""

    a: float
    b: float
    c: float
    error: float
    scores: int

    @property
    def matrices(self) -> float:
        return self.c / self.scores

    @property
    def told(self) -> bool:
        """Whether the lengths tell c so well that one score matrix could not be missed."""
        return 3 * self.error < self.scores

    @property
    def quadratic(self) -> bool:
        """Whether memory grows with N²: more than the noise, and at least a quarter of one score matrix."""
        return self.c > 3 * self.error and self.matrices > 0.25

    def at(self, tokens: float) -> float:
        """Bytes for a prompt of so many tokens."""
        return self.a + self.b * tokens + self.c * tokens**2


def fit(told: Sequence[tuple[int, int]], heads: int, bytes_per_value: int, batch: int = 1) -> Fit | None:
    """The parabola nearest to (length, bytes); None for fewer than `LEAST` different lengths."""
    if len(dict(told)) < LEAST:
        return None
    lengths, nbytes = np.asarray(told, dtype=float).T
    scale = lengths.max()  # powers of like size: N² of long prompts would drown the others
    found, covariance = np.polyfit(lengths / scale, nbytes, 2, cov=True)
    c, b, a = (found / scale ** np.array([2, 1, 0])).tolist()
    error = float(covariance[0, 0]) ** 0.5 / float(scale) ** 2
    return Fit(a, b, c, error, attention_scores(heads, 1, bytes_per_value) * batch)
