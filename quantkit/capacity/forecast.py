"""All that follows from a model and a device, as one record: what `quantkit plan --json` prints.

docs/plan.md explains its fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.capacity import formats, job, kv_cache, roofline
from quantkit.capacity.attention import LayerCache, Unsupported, layer_caches
from quantkit.capacity.devices import Device
from quantkit.capacity.settings import Settings
from quantkit.capacity.source import Source
from quantkit.errors import UNSUPPORTED, USAGE, QuantkitError

SCHEMA = "quantkit.capacity/1"
TOKENS = 4096  # of a sequence where nothing is said
PAGES = (16, 32)
GROUPED_HEADS = 8  # of the what-if where the model itself does not share heads


@dataclass(frozen=True)
class Question:
    """What is asked about a model. tokens: of a sequence; batch: sequences at once; method: the format that
    the figures beside the tables are for."""

    tokens: int | None = None
    batch: int = 1
    kv_dtype: str = "bfloat16"
    method: str = "bf16"
    device: Device | None = None
    samples: int = job.SAMPLES
    seqlen: int = job.SEQLEN

    @property
    def memory(self) -> int | None:
        """Bytes for weights and cache."""
        device = self.device
        return None if not device or not device.memory_bytes else int(device.usable * device.memory_bytes)


def of_source(source: Source, question: Question) -> dict[str, Any]:
    """The record of a model. Raises QuantkitError for a question that makes no sense for it."""
    settings, parameters = source.settings, source.parameters
    _check(question)
    tokens = question.tokens or min(TOKENS, settings.context or TOKENS)
    notes = list(source.notes)
    if settings.context and tokens > settings.context:
        notes.append(f"{tokens:,} tokens are more than the {settings.context:,} it was made for")
    caches, reason = _caches(source)
    cache = _cache_record(caches, reason, settings, question, tokens)
    per_sequence = (
        kv_cache.sequence_bytes(caches, tokens, _kv_bytes(question), kv_cache.PAGE) if caches else None
    )
    active = parameters.active(settings)
    weights = {
        name: _weights_record(
            formats.weights(name, parameters, settings),
            active / parameters.count,
            question,
            per_sequence,
            cache,
        )
        for name in formats.NAMES
    }
    return {
        "schema": SCHEMA,
        "model": source.name,
        "parameters": {
            "count": parameters.count,
            "active": active,
            "exact": parameters.exact,
            "basis": source.basis,
            "stored_bytes": parameters.stored_bytes if parameters.exact else None,
        },
        "architecture": _architecture(settings, caches),
        "device": _device_record(question),
        "kv_cache": cache,
        "weights": weights,
        **_headline(weights, question),
        "job": job.of_model(parameters, settings, question.device, question.samples, question.seqlen),
        "notes": notes,
    }


def of_count(count: int, question: Question) -> dict[str, Any]:
    """The record of so many parameters, and nothing known about where they are."""
    _check(question)
    reason = "--params says nothing about layers and heads"
    weights = {
        name: _weights_record(formats.by_count(name, count), 1.0, question, None, {})
        for name in formats.NAMES
    }
    return {
        "schema": SCHEMA,
        "model": None,
        "parameters": {
            "count": count,
            "active": count,
            "exact": False,
            "basis": "--params",
            "stored_bytes": None,
        },
        "architecture": None,
        "device": _device_record(question),
        "kv_cache": {"bytes_per_sequence": None, "unsupported": reason},
        "weights": weights,
        **_headline(weights, question),
        "job": {},
        "notes": ["sizes as if every parameter were packed: embeddings that stay in 16 bit come on top"],
    }


def _check(question: Question) -> None:
    """Raise QuantkitError for numbers that make no sense."""
    numbers = {"--ctx": question.tokens, "--batch": question.batch, "--samples": question.samples}
    for flag, value in (numbers | {"--seqlen": question.seqlen}).items():
        if value is not None and not 1 <= value <= 1 << 32:
            raise QuantkitError(f"{flag} {value} makes no sense", "choose 1 or more", USAGE)


def _caches(source: Source) -> tuple[list[LayerCache] | None, str | None]:
    try:
        return layer_caches(source.settings, source.parameters), None
    except Unsupported as error:
        return None, str(error)


def _kv_bytes(question: Question):
    return kv_cache.DTYPES[question.kv_dtype]


def _architecture(settings: Settings, caches: Sequence[LayerCache] | None) -> dict[str, Any]:
    heads = settings.heads if settings.get("num_attention_heads", "n_head", "n_heads") else None
    return {
        "model_type": settings.model_type,
        "layers": settings.layers,
        "hidden": settings.hidden,
        "heads": heads,
        "kv_heads": settings.kv_heads if heads else None,
        "head_dim": settings.head_dim if heads else None,
        "context": settings.context,
        "layer_types": dict(Counter(cache.kind for cache in caches)) if caches else None,
    }


def _device_record(question: Question) -> dict[str, Any] | None:
    device = question.device
    return device and {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": question.memory,
        "bandwidth": device.bandwidth_gbs and device.bandwidth_gbs * 1e9,
        "flops": device.tflops and device.tflops * 1e12,
    }


def _cache_record(
    caches: Sequence[LayerCache] | None,
    reason: str | None,
    settings: Settings,
    question: Question,
    tokens: int,
) -> dict[str, Any]:
    """Bytes of the cache, what other heads would make of them, and what allocators waste."""
    if caches is None:
        return {"bytes_per_sequence": None, "unsupported": reason}
    dtype = _kv_bytes(question)
    exact = kv_cache.sequence_bytes(caches, tokens, dtype)
    record: dict[str, Any] = {
        "dtype": question.kv_dtype,
        "tokens": tokens,
        "batch": question.batch,
        "values_per_sequence": kv_cache.values(caches, tokens),
        "bytes_per_token": kv_cache.sequence_bytes(caches, 1, dtype)
        - kv_cache.sequence_bytes(caches, 0, dtype),
        "bytes_per_sequence": exact,
        "bytes": exact * question.batch,
        "what_if": _what_if(caches, settings, tokens, dtype),
        "attention_scores_bytes": kv_cache.attention_scores(settings.heads, tokens)
        if _attends(caches)
        else 0,
    }
    record["paged"] = {
        str(page): {
            "bytes_per_sequence": (paged := kv_cache.sequence_bytes(caches, tokens, dtype, page)),
            "wasted_bytes": paged - exact,
            "most_wasted_bytes": kv_cache.sequence_bytes(caches, page, dtype)
            - kv_cache.sequence_bytes(caches, 1, dtype),
        }
        for page in PAGES
    }
    whole = max(tokens, settings.context or 0)
    reserved = kv_cache.sequence_bytes(caches, whole, dtype)
    record["reserved"] = {"tokens": whole, "bytes_per_sequence": reserved, "wasted_bytes": reserved - exact}
    return record


def _attends(caches: Sequence[LayerCache]) -> bool:
    return any(cache.values for cache in caches)


def _what_if(caches: Sequence[LayerCache], settings: Settings, tokens: int, dtype: Any) -> dict[str, dict]:
    """The cache with a key and a value for every head, for groups of heads, and for all heads together."""
    if any(cache.kind not in ("full", "sliding", "chunked", "shared") for cache in caches):
        return {}
    heads, own = settings.heads, settings.kv_heads
    grouped = own if 1 < own < heads else GROUPED_HEADS
    choices = {"mha": heads, "gqa": grouped, "mqa": 1}
    if not (grouped < heads and heads % grouped == 0):
        del choices["gqa"]
    now = kv_cache.sequence_bytes(caches, tokens, dtype)
    return {name: {"kv_heads": k, "bytes_per_sequence": now * k // own} for name, k in choices.items()}


def _weights_record(
    weights: formats.Weights, active: float, question: Question, per_sequence: int | None, cache: dict
) -> dict[str, Any]:
    """A format's bytes, and what they leave room for on the device."""
    record: dict[str, Any] = {"bytes": weights.bytes, "bits_per_weight": weights.bits_per_weight}
    if weights.bytes is None:
        return record | {"reason": weights.reason}
    device, memory = question.device, question.memory
    record["fits"] = None if memory is None else weights.bytes <= memory
    fitting = memory is not None and per_sequence
    record["requests_that_fit"] = kv_cache.fitting(memory - weights.bytes, per_sequence) if fitting else None
    bandwidth = device and device.bandwidth_gbs and device.bandwidth_gbs * 1e9
    flops = device and device.tflops and device.tflops * 1e12
    record["bytes_per_weight"] = weights.stream_bits / 8
    record["optimal_batch"] = (
        roofline.optimal_batch(flops, bandwidth, weights.stream_bits / 8) if bandwidth and flops else None
    )
    one = cache.get("bytes_per_sequence") or 0
    record["tokens_per_second"] = (
        roofline.tokens_per_second(bandwidth, weights.bytes * active, one) if bandwidth else None
    )
    return record


def _headline(weights: dict[str, dict], question: Question) -> dict[str, Any]:
    """The figures of the one format that was asked for. Raises QuantkitError if it cannot hold the model."""
    chosen = weights[question.method]
    if chosen["bytes"] is None:
        raise QuantkitError(
            f"{question.method} cannot hold this model: {chosen['reason']}",
            hint="choose another --method; without, the figures are those of bf16",
            exit_code=UNSUPPORTED,
        )
    return {
        "method": question.method,
        "roofline": {
            "optimal_batch": chosen["optimal_batch"],
            "bytes_per_weight": chosen["bytes_per_weight"],
            "tokens_per_second": chosen["tokens_per_second"],
        },
        "requests_that_fit": chosen["requests_that_fit"],
    }
