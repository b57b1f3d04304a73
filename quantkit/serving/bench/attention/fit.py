"""Memory as a function of the prompt: bytes = a + b·N + c·N², by least squares.

b is what every token leaves behind (KV cache, hidden states); c is what exists for every pair of tokens:
scores that are written out. FlashAttention (Dao et al. 2022, arXiv:2205.14135) has c = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantkit.capacity.kv_cache import attention_scores

LEAST = 4  # lengths: three would be met exactly, whatever they are


def fit(
    told: Sequence[tuple[int, int]], heads: int, bytes_per_value: int, batch: int = 1
) -> dict[str, float | bool] | None:
    """The parabola nearest to (length, bytes); None for fewer than `LEAST` different lengths.

    error: the standard error of c. scores: bytes·N⁻² of one layer's scores, all sequences of the batch;
    matrices: how many of them c is. told: whether the lengths tell c so well that one score matrix could not
    be missed. quadratic: whether memory grows with N²: more than the noise, and at least a quarter of one
    score matrix.
    """
    if len(dict(told)) < LEAST:
        return None
    lengths, nbytes = np.asarray(told, dtype=float).T
    scale = lengths.max()  # powers of like size: N² of long prompts would drown the others
    found, covariance = np.polyfit(lengths / scale, nbytes, 2, cov=True)
    c, b, a = (found / scale ** np.array([2, 1, 0])).tolist()
    error = float(covariance[0, 0]) ** 0.5 / float(scale) ** 2
    scores = attention_scores(heads, 1, bytes_per_value) * batch
    return {
        "a": a,
        "b": b,
        "c": c,
        "error": error,
        "scores": scores,
        "matrices": c / scores,
        "told": 3 * error < scores,
        "quadratic": c > 3 * error and c / scores > 0.25,
    }
