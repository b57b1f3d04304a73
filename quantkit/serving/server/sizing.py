"""Chooses the context length and the number of sequences at once so that weights and cache fit the memory.

Usable memory is a fraction of the device's free memory. Weights take their size on disk; the cache takes the
pages that `quantkit plan` counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.capacity import Unsupported, kv_cache
from quantkit.capacity.source import Source
from quantkit.errors import RESOURCES, QuantkitError
from quantkit.models import kv_types
from quantkit.serving.server.settings import ServeSettings
from quantkit.tables import size

USUAL = 8192  # default tokens per sequence if the engine allocates the cache in advance
SHORT, SHORTEST = 2048, 512


@dataclass(frozen=True)
class ServerSize:
    """Lengths and memory of a server. ctx: tokens per sequence. parallel: sequences at once. cache_bytes: for
    the cache of all sequences, None if unknown; cache_tokens: tokens that fit in the cache. memory_bytes:
    usable memory of the device, for weights and cache. on_cpu: whether the device is the CPU."""

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
    settings: ServeSettings,
    usable: int,
    on_cpu: bool,
    parallel: int,
    reserves: bool,
    notes: list[str],
) -> ServerSize:
    """Return lengths and memory that fit; defaults unchanged for a model whose cache is unknown.

    usable: bytes for weights and cache. parallel: the engine's default number of sequences. reserves: whether
    the engine allocates the full length of all sequences in advance. Appends notes for the user to `notes`.
    Raises QuantkitError (exit code 5) if not even the shortest length fits.
    """
    model, requested = source and source.settings, settings.ctx
    limit = model.context if model else None
    if requested and limit and requested > limit:
        notes.append(f"{requested:,} tokens are more than the {limit:,} that the model was made for")
    paged = not reserves and not on_cpu
    most = requested or (limit or USUAL if paged else min(limit or USUAL, USUAL))
    sequences = settings.parallel or parallel
    try:
        caches = kv_cache.layer_caches(model, source.parameters) if model and source.parameters else None
    except Unsupported as error:
        caches = None
        notes.append(f"the cache is not counted: {error}")
    dtype = settings.kv_dtype or ("float32" if settings.dtype == "float32" else "bfloat16")
    left, value_bytes = usable - weight_bytes, kv_types.TYPES[dtype].nbytes
    for ctx, count in _candidates(most, sequences, settings):
        per_sequence = kv_cache.sequence_bytes(caches or (), ctx, value_bytes, kv_cache.PAGE)
        if per_sequence * (count if reserves else 1) <= left:
            break
    else:
        cache = "" if caches is None else f" and a cache of {size(per_sequence * (settings.parallel or 1))}"
        what = (
            f"weights of {size(weight_bytes)}{cache} do not fit the {size(usable)} of memory that may be used"
        )
        hint = "a shorter --ctx, a smaller --parallel or --kv-dtype, or a smaller model: see quantkit plan"
        raise QuantkitError(what, hint, RESOURCES)
    if (ctx, count) != (most, sequences):
        notes.append(f"of {most:,} tokens × {sequences}, {ctx:,} × {count} fit in {size(usable)}")
    cache_bytes = left if paged else min(per_sequence * count, left)
    tokens = cache_bytes * ctx // per_sequence if per_sequence else ctx * count  # 0: no attention, or unknown
    known = None if caches is None else cache_bytes
    return ServerSize(ctx, count, known, tokens, weight_bytes, usable, on_cpu)


def _candidates(most: int, sequences: int, settings: ServeSettings) -> Iterator[tuple[int, int]]:
    """Yield lengths and numbers of sequences, the largest first. Requested numbers stay unchanged. Defaults
    are halved: first the length down to SHORT, then the number of sequences, then the length down to
    SHORTEST."""
    ctx, count = most, sequences
    yield ctx, count
    while not settings.ctx and ctx // 2 >= min(most, SHORT):
        yield (ctx := ctx // 2), count
    while not settings.parallel and count > 1:
        yield ctx, (count := count // 2)
    while not settings.ctx and ctx // 2 >= min(most, SHORTEST):
        yield (ctx := ctx // 2), count
