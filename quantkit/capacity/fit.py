"""What a format leaves room for on a device, and how fast it can be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from quantkit.capacity import kv_cache, roofline
from quantkit.capacity.devices import Device
from quantkit.capacity.formats import Weights
from quantkit.capacity.kv_cache import LayerCache


@dataclass(frozen=True)
class Load:
    """What sequences need beside the weights. cache_bytes: of one, as it is read; paged_bytes: as it lies in
    memory, in whole pages; None where that is not known. batch: sequences at once."""

    cache_bytes: int | None
    paged_bytes: int | None
    batch: int

    @staticmethod
    def of(caches: Sequence[LayerCache] | None, tokens: int, batch: int, bytes_per_value: Fraction) -> Load:
        """Of sequences of so many tokens."""
        if caches is None:
            return Load(None, None, batch)
        read = kv_cache.sequence_bytes(caches, tokens, bytes_per_value)
        return Load(read, kv_cache.sequence_bytes(caches, tokens, bytes_per_value, kv_cache.PAGE), batch)


def record(
    weights: Weights, device: Device | None, memory: int | None, load: Load, computes: str = "16 bit"
) -> dict[str, Any]:
    """A format's bytes, and what they leave of `memory` bytes of the device; computes: the type of its
    products, where the device has it.

    It fits where the weights do and the caches of all sequences beside them, as far as those are known.
    """
    found: dict[str, Any] = {"bytes": weights.bytes, "bits_per_weight": weights.bits_per_weight}
    if weights.bytes is None:
        return found | {"reason": weights.reason}
    bytes_per_weight = weights.stream_bits / 8
    bandwidth = device and device.bandwidth_gbs and device.bandwidth_gbs * 1e9
    peak = device and device.peak(computes)
    flops = peak and peak * 1e12
    needed = weights.bytes + load.batch * (load.paged_bytes or 0)
    found["fits"] = None if memory is None else needed <= memory
    counts = memory is not None and load.paged_bytes
    found["requests_that_fit"] = max(0, memory - weights.bytes) // load.paged_bytes if counts else None
    found["bytes_per_weight"] = bytes_per_weight
    found["computes"] = computes if device is None or computes in device.fewer else "16 bit"
    found["optimal_batch"] = (
        roofline.optimal_batch(flops, bandwidth, bytes_per_weight) if bandwidth and flops else None
    )
    found["read_bytes"] = weights.read_bytes
    found["tokens_per_second"] = (
        roofline.tokens_per_second(bandwidth, weights.read_bytes, load.cache_bytes or 0)
        if bandwidth and weights.read_bytes
        else None
    )
    return found
