"""The JSON record of `quantkit plan`; docs/plan.md explains the fields."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.capacity import Unsupported, devices, formats, job, kv_cache, source
from quantkit.capacity.kv_cache import LayerCache
from quantkit.capacity.question import Question
from quantkit.capacity.settings import HEADS, Settings
from quantkit.capacity.source import AS_IF_PACKED, Source
from quantkit.errors import NOT_FOUND, UNSUPPORTED, USAGE, require
from quantkit.models import kv_types

SCHEMA = "quantkit.capacity/2"
USUAL_TOKENS = 4096  # default tokens per sequence
PAGES = (16, 32)
NO_LAYERS = "--params gives no layers and heads"
GROUPED_HEADS = 8  # key/value heads to assume for models without grouped heads
ROOFLINE = ("optimal_batch", "bytes_per_weight", "tokens_per_second")


def answer(
    model: str | None,
    params: str | None,
    question: Question,
    revision: str | None = None,
    offline: bool = False,
) -> dict[str, Any]:
    """Return the JSON of `quantkit plan` for a model, or for a number of parameters such as `7B`."""
    hint = "for example: quantkit plan ./model, or quantkit plan --params 7B"
    require((model is None) != (params is None), "give either a model or --params", hint, USAGE)
    question.check()  # before the model is read
    if model is not None and re.fullmatch(rf"{source.NUMBER}(-A{source.NUMBER})?", model.upper()):
        hint = f"for a number of parameters: quantkit plan --params {model}"
        require(Path(model).exists(), f"no such folder: {model}", hint, NOT_FOUND)
    if model is None:
        counted = Source(None, None, "--params", (AS_IF_PACKED,), count=source.parse_count(params))
        return of_source(counted, question)
    return of_source(source.read(model, revision, offline), question)


def of_source(source: Source, question: Question) -> dict[str, Any]:
    """Return the JSON record of `quantkit plan` for a model."""
    method = formats.named(question.format) if question.format else None
    settings, parameters = source.settings, source.parameters
    tokens = question.ctx or USUAL_TOKENS
    caches, cache, notes = None, {"bytes_per_sequence": None, "unsupported": NO_LAYERS}, list(source.notes)
    if settings is not None:
        tokens = question.ctx or min(USUAL_TOKENS, settings.context or USUAL_TOKENS)
        if settings.context and tokens > settings.context:
            notes.append(f"{tokens:,} tokens are more than the model's {settings.context:,}")
        try:
            caches = kv_cache.layer_caches(settings, parameters)
            cache = _cache_record(caches, settings, question, tokens)
        except Unsupported as error:
            cache = {"bytes_per_sequence": None, "unsupported": str(error)}
    if parameters is None:
        notes.append("what a job takes depends on the model's shapes: give a model instead of --params")
    names = (formats.STORED,) * bool(parameters and parameters.exact) + formats.names()
    weights = {name: _in_format(name, source, question, caches, tokens) for name in names}
    if question.device and question.device.count > 1:
        notes.append(
            f"{question.device.count} devices are counted as one, an upper bound: communication takes time, "
            "and each device stores what cannot be divided"
        )
    return {
        "schema": SCHEMA,
        "model": source.name,
        "parameters": _parameters(source),
        "architecture": settings and _architecture(settings, caches),
        "device": _device_record(question),
        "kv_cache": cache,
        "weights": weights,
        **_headline(weights, method or ("stored" if source.layout else "bf16")),
        "job": job.of_model(source, question) if parameters else {},
        "notes": notes,
    }


def _parameters(source: Source) -> dict[str, Any]:
    parameters = source.parameters
    exact = bool(parameters) and parameters.exact
    return {
        "count": parameters.count if parameters else source.count[0],
        "active": parameters.active if parameters else source.count[1],
        "exact": exact,
        "basis": source.basis,
        "stored_bytes": parameters.stored_bytes if exact else None,
        "quantized": source.layout is not None,
    }


def _in_format(
    name: str, source: Source, question: Question, caches: Sequence[LayerCache] | None, tokens: int
) -> dict[str, Any]:
    """Return the JSON of one format: bytes, whether it fits on the device, and bounds on its speed. caches:
    None, and not counted, if unknown."""
    try:
        if source.parameters is None:
            weights = formats.by_count(name, *source.count)
        else:
            weights = formats.weights(name, source.parameters)
    except Unsupported as error:
        return {"bytes": None, "bits_per_weight": None, "reason": str(error)}
    device, memory, each = question.device, question.memory, weights.stream_bits / 8
    computes = formats.computes(name)
    cached, paged = (
        kv_cache.sequence_bytes(caches or (), tokens, question.kv_bytes, page) for page in (1, kv_cache.PAGE)
    )
    read_bytes = weights.read_bytes and weights.read_bytes + cached
    bandwidth = device and device.bandwidth_gbs and device.bandwidth_gbs * 1e9
    flops = device and device.tflops and device.peak(computes) * 1e12
    free = memory is not None and memory - weights.bytes
    return {
        "bytes": weights.bytes,
        "bits_per_weight": weights.bits_per_weight,
        "fits": None if memory is None else question.batch * paged <= free,
        "requests_that_fit": max(0, free) // paged if memory is not None and paged else None,
        "bytes_per_weight": each,
        "computes": computes if device is None or computes in device.fewer else formats.BITS16,
        "optimal_batch": devices.optimal_batch(flops, bandwidth, each) if bandwidth and flops else None,
        "read_bytes": weights.read_bytes,
        "tokens_per_second": bandwidth / read_bytes if bandwidth and read_bytes else None,
    }


def _architecture(settings: Settings, caches: Sequence[LayerCache] | None) -> dict[str, Any]:
    heads = settings.heads if settings.filled(*HEADS) else None
    latent = any(cache.kind == "latent" for cache in caches or ())
    known = heads and caches is not None and not latent
    kv_heads = settings.kv_heads if known else None
    shared = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"  # by groups of queries
    windows: dict[str, list[int]] = {}
    for cache in caches or ():
        if cache.window is not None and cache.window not in windows.setdefault(cache.kind, []):
            windows[cache.kind].append(cache.window)
    return {
        "model_type": settings.model_type,
        "layers": settings.layers,
        "hidden": settings.hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "attention": "MLA" if latent else shared if known else None,
        "head_dim": settings.head_dim if heads else None,
        "context": settings.context,
        "layer_types": dict(Counter(cache.kind for cache in caches)) if caches else None,
        "windows": windows,
    }


def _device_record(question: Question) -> dict[str, Any] | None:
    device = question.device
    return device and {
        "name": device.name,
        "count": device.count,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": question.memory,
        "bandwidth": device.bandwidth_gbs and device.bandwidth_gbs * 1e9,
        "flops": device.tflops and device.tflops * 1e12,
        "flops_of_fewer_bits": {name: tflops * 1e12 for name, tflops in device.fewer.items()},
    }


def _cache_record(
    caches: Sequence[LayerCache], settings: Settings, question: Question, tokens: int
) -> dict[str, Any]:
    """Return the JSON of the KV cache: bytes, bytes with other numbers of heads, bytes that paging wastes."""
    nbytes = partial(kv_cache.sequence_bytes, caches, bytes_per_value=question.kv_bytes)
    exact, whole = nbytes(tokens), max(tokens, settings.context or 0)
    heads = settings.filled(*HEADS)  # None if layers differ
    scores = kv_cache.attention_scores(settings.heads, tokens) if heads else None
    paged = {page: nbytes(tokens, page=page) for page in PAGES}
    return {
        "dtype": kv_types.named(question.kv_dtype),
        "tokens": tokens,
        "batch": question.batch,
        "values_per_sequence": kv_cache.values(caches, tokens),
        "bytes_per_token": nbytes(1) - nbytes(0),
        "bytes_per_sequence": exact,
        "bytes": exact * question.batch,
        "what_if": _what_if(caches, settings, exact),
        "attention_scores_bytes": scores if any(cache.values for cache in caches) else 0,
        "paged": {
            str(page): {
                "bytes_per_sequence": taken,
                "wasted_bytes": taken - exact,
                "most_wasted_bytes": nbytes(page) - nbytes(1),
            }
            for page, taken in paged.items()
        },
        "reserved": {
            "tokens": whole,
            "bytes_per_sequence": nbytes(whole),
            "wasted_bytes": nbytes(whole) - exact,
        },
    }


def _what_if(caches: Sequence[LayerCache], settings: Settings, now: int) -> dict[str, dict]:
    """Return the cache's bytes for own (mha), grouped (gqa) or common (mqa) keys and values of heads."""
    usual = all(cache.kind in ("full", "sliding", "chunked", "shared") for cache in caches)
    if not usual or not settings.filled(*HEADS):
        return {}
    heads, kv_heads = settings.heads, settings.kv_heads
    grouped = kv_heads if 1 < kv_heads < heads else GROUPED_HEADS
    choices = {"mha": heads, "gqa": grouped, "mqa": 1}
    if not (grouped < heads and heads % grouped == 0):
        del choices["gqa"]
    return {name: {"kv_heads": k, "bytes_per_sequence": now * k // kv_heads} for name, k in choices.items()}


def _headline(weights: dict[str, dict], method: str) -> dict[str, Any]:
    """Return the main figures of format `method`. Raises QuantkitError if it cannot store the model."""
    chosen = weights.get(method, {"bytes": None, "reason": "no headers were read"})
    what = f"{method} cannot store this model: {chosen.get('reason')}"
    require(chosen["bytes"] is not None, what, "choose another --format, such as bf16", UNSUPPORTED)
    return {
        "method": method,
        "roofline": {key: chosen[key] for key in ROOFLINE},
        "requests_that_fit": chosen["requests_that_fit"],
    }
