"""The length of sequences, their number at once and their cache, so that all fits the memory.

Memory is the device's (of a CPU what is free), times a fraction. Weights are what the files hold; the cache
is counted as `quantkit plan` counts it, in pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.capacity import Unsupported, kv_cache
from quantkit.capacity.source import Source
from quantkit.errors import RESOURCES, QuantkitError
from quantkit.models import kv_types
from quantkit.serving.server.settings import Settings
from quantkit.tables import size

USUAL = 8192  # tokens of a sequence by default, where the cache is reserved in advance
SHORT, SHORTEST = 2048, 512


@dataclass(frozen=True)
class Room:
    """ctx: tokens of each of `parallel` sequences; cache_bytes: of all of them, at most what is free, None
    where unknown; cache_tokens: tokens that fit the cache. memory_bytes: of the device, for weights and
    cache; on_cpu: whether the device is the CPU."""

    ctx: int
    parallel: int
    cache_bytes: int | None
    cache_tokens: int
    weight_bytes: int
    memory_bytes: int
    on_cpu: bool


def fit(
    source: Source | None,
    weight_bytes: int,
    settings: Settings,
    usable: int,
    on_cpu: bool,
    parallel: int,
    reserves: bool,
    notes: list[str],
) -> Room:
    """Return the requested or default room, halved until it fits; unchanged for an unknown model.

    Requested numbers stay. Defaults are halved: lengths down to SHORT, then sequences, then lengths down to
    SHORTEST.

    usable: bytes for weights and cache; parallel: the engine's default; reserves: whether the
    engine allocates all sequences at their full length in advance, rather than in pages. notes: for the user,
    appended to. Raises QuantkitError (exit code 5) where not even the least fits.
    """
    found, requested = source and source.settings, settings.ctx
    limit = found.context if found else None
    if requested and limit and requested > limit:
        notes.append(f"{requested:,} tokens are more than the {limit:,} that the model was made for")
    paged = not reserves and not on_cpu
    ctx = requested or (limit or USUAL if paged else min(limit or USUAL, USUAL))
    slots = settings.parallel or parallel
    try:
        caches = kv_cache.layer_caches(found, source.parameters) if found and source.parameters else None
    except Unsupported as error:
        caches = None
        notes.append(f"the cache is not counted: {error}")
    if caches is None:
        return Room(ctx, slots, None, ctx * slots, weight_bytes, usable, on_cpu)
    dtype = settings.cache or ("float32" if settings.dtype == "float32" else "bfloat16")

    def one(tokens: int) -> int:
        """Return the bytes of one sequence in pages."""
        return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes, kv_cache.PAGE)

    left, length, count = usable - weight_bytes, ctx, slots
    while (each := one(length)) * (count if reserves else 1) > left:
        if not requested and length // 2 >= min(ctx, SHORT):
            length //= 2
        elif not settings.parallel and count > 1:
            count //= 2
        elif not requested and length // 2 >= min(ctx, SHORTEST):
            length //= 2
        else:
            raise QuantkitError(
                f"weights of {size(weight_bytes)} and a cache of {size(each * (settings.parallel or 1))} do "
                f"not fit the {size(usable)} of memory that may be used",
                "a shorter --ctx, a smaller --parallel or --kv-dtype, or a smaller model: see quantkit plan",
                RESOURCES,
            )
    if (length, count) != (ctx, slots):
        notes.append(f"of {ctx:,} tokens × {slots}, {length:,} × {count} fit in {size(usable)}")
    cache = left if paged else min(each * count, left)
    tokens = cache * length // each if each else length * count  # 0 without attention
    return Room(length, count, cache, tokens, weight_bytes, usable, on_cpu)
