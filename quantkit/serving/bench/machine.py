"""Bandwidth and FLOPS of the machine at hand: from the data sheet where the device is known, else measured.

What is measured is what a step of decoding does: a matrix as large as the model's weights is read once and
multiplied by a vector (bandwidth), and two square matrices are multiplied in the model's precision (FLOPS),
by as many threads. Small models live in the cache, which is why the size matters. A CPU reads in float32, for
which its kernels are best.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from quantkit.capacity import devices
from quantkit.errors import QuantkitError
from quantkit.models.machine.device import free_memory, is_accelerator, synchronize

SIDE = 1024  # of the matrices that are multiplied
COLUMNS = 1024  # of the matrix that is read
LEAST, MOST = 1 << 20, 1 << 30  # bytes that are read
SECONDS = 0.3  # for each of both figures
TRIALS = 5  # at least
Clock = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """Seconds, asked when all the work on the device is done."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    return clock


def rates(device: torch.device, dtype: torch.dtype, read_bytes: int) -> dict[str, float | str]:
    """bandwidth in bytes a second, flops, and where they come from: `measured`, or a device's name."""
    if known := _data_sheet(device):
        return known
    read = dtype if is_accelerator(device) else torch.float32
    room = free_memory(device) // 4
    rows = max(1, min(max(LEAST, read_bytes), MOST, room) // (COLUMNS * read.itemsize))
    matrix = torch.ones(rows, COLUMNS, dtype=read, device=device)
    vector = torch.ones(COLUMNS, dtype=read, device=device)
    square = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    reading = _fastest(device, lambda: matrix @ vector)
    computing = _fastest(device, lambda: square @ square)
    return {
        "bandwidth": matrix.numel() * read.itemsize / reading,
        "flops": 2 * SIDE**3 / computing,
        "source": "measured",
    }


def _data_sheet(device: torch.device) -> dict[str, float | str] | None:
    """Of a device that capacity knows by the name that its driver gives it."""
    if not is_accelerator(device):
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", str)(device)
    try:
        known = devices.find(name)
    except QuantkitError:
        return None
    return {
        "bandwidth": known.bandwidth_gbs * 1e9,
        "flops": known.tflops * 1e12,
        "source": f"data sheet of {known.name}",
    }


def _fastest(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the fastest of many runs: what the machine can, not what it did beside other work."""
    run()
    clock = clock_of(device)
    times = [clock()]
    while len(times) <= TRIALS or times[-1] - times[0] < SECONDS:
        run()
        times.append(clock())
    return min(after - before for before, after in itertools.pairwise(times))
