"""The cache of keys and values: bytes per sequence, and what allocators waste on top of it.

    bytes = 2 · bytes_per_value · layers · kv_heads · head_dim · tokens · batch

where every layer keeps a key and a value of every token. In general the layers differ: `LayerCache`.
Blocks of a paged cache: Kwon et al. 2023 (PagedAttention, arXiv:2309.06180), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

CONV_BYTES, STATE_BYTES = 2, 4  # of recurrent layers: last inputs in 16 bit, states in float32
PAGE = 16  # tokens per block of a paged cache, vLLM's default


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of a sequence.

    kind: full, sliding, chunked, latent, recurrent, hybrid, shared (it reads another layer's) or none.
    values: numbers per token; window: tokens at most, None for all of them. conv, state: numbers kept
    whatever the length, of the last inputs of a convolution and of a recurrence.
    """

    kind: str
    values: int = 0
    window: int | None = None
    conv: int = 0
    state: int = 0

    def tokens(self, length: int) -> int:
        """How many of `length` tokens it keeps."""
        return length if self.window is None else min(length, self.window)


def values(caches: Sequence[LayerCache], tokens: int) -> int:
    """Numbers that keys and values of a sequence of `tokens` take in all layers."""
    return sum(cache.values * cache.tokens(tokens) for cache in caches)


def sequence_bytes(
    caches: Sequence[LayerCache], tokens: int, bytes_per_value: Fraction, page: int = 1
) -> int:
    """Bytes that one sequence takes; with `page` in blocks of so many tokens, the last one filled or not."""
    paged = sum(cache.values * -(-cache.tokens(tokens) // page) * page for cache in caches)
    states = sum(CONV_BYTES * cache.conv + STATE_BYTES * cache.state for cache in caches)
    return int(paged * bytes_per_value) + states


def attention_scores(heads: int, tokens: int, bytes_per_value: int = 2) -> int:
    """Bytes of one layer's scores `softmax(Q Kᵀ) [heads, N, N]` of one sequence where they are written out.

    FlashAttention (Dao et al. 2022, arXiv:2205.14135) never does; this is what it saves.
    """
    return heads * bytes_per_value * tokens**2
