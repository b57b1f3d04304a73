"""The roofline of decoding: what bandwidth and FLOPS allow (Williams, Waterman, Patterson 2009).

A step reads every weight once and uses it in one multiplication and one addition per sequence:

    memory time  = weights · bytes_per_weight / bandwidth
    compute time = 2 · weights · batch / FLOPS

They are equal at `batch = FLOPS · bytes_per_weight / (2 · bandwidth)`. Below, a further sequence is free;
above, it costs its share. An A100 of 40 GB (312 TFLOPS, 1555 GB/s) at one byte per weight: 100.3. Where
102.7 is found for it, a factor 1024 stands for 1000 between tera and giga.
"""

from __future__ import annotations


def optimal_batch(flops: float, bandwidth: float, bytes_per_weight: float) -> float:
    """Sequences at which reading weights and computing with them take equally long.

    flops per second, bandwidth in bytes per second.
    """
    return flops * bytes_per_weight / (2 * bandwidth)


def tokens_per_second(bandwidth: float, weight_bytes: float, cache_bytes: float = 0) -> float:
    """At most, for one sequence: every token reads the active weights and the whole cache."""
    return bandwidth / (weight_bytes + cache_bytes)
