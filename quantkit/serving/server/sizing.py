"""How long sequences may be, how many at once, and what their cache takes, so that it fits: from the plan.

Memory is the device's (of a CPU what is free), times a fraction. Weights are what the files hold; the cache
is counted as `quantkit plan` counts it, in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.capacity import kv_cache
from quantkit.capacity.attention import Unsupported, layer_caches
from quantkit.capacity.kv_cache import LayerCache
from quantkit.capacity.source import Source
from quantkit.errors import RESOURCES, QuantkitError
from quantkit.models import kv_types
from quantkit.serving.server.settings import Settings
from quantkit.tables import size

USUAL = 8192  # tokens of a sequence where nothing is said: what is reserved in advance would be memory lost
SHORT, SHORTEST = 2048, 512


@dataclass(frozen=True)
class Memory:
    """Of the device that serves. usable: bytes for weights and cache; None where that is not known."""

    kind: str  # cpu, cuda, …
    usable: int | None


@dataclass(frozen=True)
class Room:
    """ctx: tokens of each of `parallel` sequences; cache_bytes: of all of them, at most what is free, None
    where that is not known; cache_tokens: so many it holds."""

    ctx: int
    parallel: int
    cache_bytes: int | None
    cache_tokens: int
    weight_bytes: int
    memory: Memory
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, int | None]:
        """For `--json`."""
        return {
            "ctx": self.ctx,
            "parallel": self.parallel,
            "cache_bytes": self.cache_bytes,
            "cache_tokens": self.cache_tokens,
            "weight_bytes": self.weight_bytes,
            "memory_bytes": self.memory.usable,
        }


def fit(
    source: Source, weight_bytes: int, settings: Settings, memory: Memory, parallel: int, reserves: bool
) -> Room:
    """The most of what was asked for, or is usual, that fits.

    parallel: the engine's usual number; reserves: whether it takes the memory of all sequences at their full
    length in advance, rather than in pages. Raises QuantkitError (exit code 5) where not even the least fits.
    """
    found, notes = source.settings, []
    limit = found.context if found else None
    if settings.ctx and limit and settings.ctx > limit:
        notes.append(f"{settings.ctx:,} tokens are more than the {limit:,} that the model was made for")
    paged = not reserves and memory.kind != "cpu"
    ctx = settings.ctx or (limit or USUAL if paged else min(limit or USUAL, USUAL))
    slots = settings.parallel or parallel
    try:
        caches = layer_caches(found, source.parameters) if found and source.parameters else None
    except Unsupported as error:
        caches = None
        notes.append(f"the cache is not counted: {error}")
    if caches is None or memory.usable is None:
        return Room(ctx, slots, None, ctx * slots, weight_bytes, memory, tuple(notes))
    left = memory.usable - weight_bytes
    for length, count in _choices(settings, ctx, slots):
        one = _bytes(caches, length, settings)
        if one * (count if reserves else 1) <= left:
            if (length, count) != (ctx, slots):
                notes.append(
                    f"of {ctx:,} tokens × {slots}, {length:,} × {count} fit in {size(memory.usable)}"
                )
            cache = min(one * count, left) if reserves or memory.kind == "cpu" else left
            tokens = cache * length // one if one else length * count  # one: 0 without attention
            return Room(length, count, cache, tokens, weight_bytes, memory, tuple(notes))
    least = _bytes(caches, settings.ctx or min(ctx, SHORTEST), settings) * (settings.parallel or 1)
    raise QuantkitError(
        f"weights of {size(weight_bytes)} and a cache of {size(least)} do not fit in the "
        f"{size(memory.usable)} that may be used of the memory",
        hint="a shorter --ctx, a smaller --parallel or --kv-dtype, or a smaller model: see quantkit plan",
        exit_code=RESOURCES,
    )


def _choices(settings: Settings, ctx: int, slots: int) -> Iterator[tuple[int, int]]:
    """What was asked for stays; what was not shrinks: lengths to what is short, then sequences, then lengths
    to what is of any use."""
    lengths = [settings.ctx] if settings.ctx else list(_halved(ctx, min(ctx, SHORT)))
    counts = [settings.parallel] if settings.parallel else list(_halved(slots, 1))
    for count in counts:
        for length in lengths:
            yield length, count
    if not settings.ctx:
        for length in _halved(lengths[-1], min(ctx, SHORTEST)):
            yield length, counts[-1]


def _halved(value: int, least: int) -> Iterator[int]:
    while value >= least:
        yield value
        value //= 2


def _bytes(caches: Sequence[LayerCache], tokens: int, settings: Settings) -> int:
    """Of one sequence in pages."""
    dtype = settings.kv_dtype or ("float32" if settings.dtype == "float32" else "bfloat16")
    return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes, kv_cache.PAGE)
