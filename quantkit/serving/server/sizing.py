"""How long sequences may be, how many at once, and what their cache takes, so that it fits: from the plan.

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

USUAL = 8192  # tokens of a sequence where nothing is said: what is reserved in advance would be memory lost
SHORT, SHORTEST = 2048, 512


@dataclass(frozen=True)
class Room:
    """ctx: tokens of each of `parallel` sequences; cache_bytes: of all of them, at most what is free, None
    where that is not known; cache_tokens: so many it holds. memory_bytes: of the device, for weights and
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
    """The most of what was asked for, or is usual, that fits; just that of a model of which nothing is known.

    What was asked for stays; what was not is halved: lengths to what is short, then sequences, then lengths
    to what is of any use.

    usable: bytes for weights and cache; parallel: the engine's usual number; reserves: whether it takes the
    memory of all sequences at their full length in advance, rather than in pages. notes: what a user should
    know is added. Raises QuantkitError (exit code 5) where not even the least fits.
    """
    found, asked = source and source.settings, settings.tokens
    limit = found.context if found else None
    if asked and limit and asked > limit:
        notes.append(f"{asked:,} tokens are more than the {limit:,} that the model was made for")
    paged = not reserves and not on_cpu
    ctx = asked or (limit or USUAL if paged else min(limit or USUAL, USUAL))
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
        """Bytes of one sequence in pages."""
        return kv_cache.sequence_bytes(caches, tokens, kv_types.TYPES[dtype].nbytes, kv_cache.PAGE)

    left, length, count = usable - weight_bytes, ctx, slots
    while (each := one(length)) * (count if reserves else 1) > left:
        if not asked and length // 2 >= min(ctx, SHORT):
            length //= 2
        elif not settings.parallel and count > 1:
            count //= 2
        elif not asked and length // 2 >= min(ctx, SHORTEST):
            length //= 2
        else:
            raise QuantkitError(
                f"weights of {size(weight_bytes)} and a cache of {size(each * (settings.parallel or 1))} do "
                f"not fit in the {size(usable)} that may be used of the memory",
                "a shorter --ctx, a smaller --parallel or --kv-dtype, or a smaller model: see quantkit plan",
                RESOURCES,
            )
    if (length, count) != (ctx, slots):
        notes.append(f"of {ctx:,} tokens × {slots}, {length:,} × {count} fit in {size(usable)}")
    cache = left if paged else min(each * count, left)
    tokens = cache * length // each if each else length * count  # 0 without attention
    return Room(length, count, cache, tokens, weight_bytes, usable, on_cpu)
