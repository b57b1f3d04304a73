"""Bandwidth and FLOPS of this machine, measured as a decoding step uses them.

Bandwidth: a matrix as large as the model's weights is multiplied by a vector; a small one would fit a cache.
FLOPS: two square matrices are multiplied in the model's precision. On a CPU bandwidth is measured in float32,
for which its kernels are best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantkit.models.machine.device import free_memory, is_accelerator
from quantkit.serving.engines.transformers import clock_of

SIDES = {"cuda": 8192}  # side of the square matrices, by type of device
SIDE = 1024
COLUMNS = 1024  # columns of the matrix that is read
LEAST, MOST = 1 << 20, 1 << 30  # limits of the bytes to read
RATE_SECONDS = 0.3  # time spent on each of the two measurements
TRIALS = 5  # least number of runs


def rates(device: torch.device, dtype: torch.dtype, read_bytes: int) -> dict[str, float]:
    """Return {"bandwidth": bytes a second, "flops": floating-point operations a second}."""
    read, side = dtype if is_accelerator(device) else torch.float32, SIDES.get(device.type, SIDE)
    room = free_memory(device) // 4
    rows = max(1, min(max(LEAST, read_bytes), MOST, room) // (COLUMNS * read.itemsize))
    matrix = torch.ones(rows, COLUMNS, dtype=read, device=device)
    vector = torch.ones(COLUMNS, dtype=read, device=device)
    square = torch.ones(side, side, dtype=dtype, device=device)
    return {
        "bandwidth": matrix.numel() * read.itemsize / _fastest(device, lambda: matrix @ vector),
        "flops": 2 * side**3 / _fastest(device, lambda: square @ square),
    }


def _fastest(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of many runs; other programs slowed the rest."""
    run()
    clock = clock_of(device)
    best, until, trials = float("inf"), clock() + RATE_SECONDS, 0
    while trials < TRIALS or clock() < until:
        began, trials = clock(), trials + 1
        run()
        best = min(best, clock() - began)
    return best
