"""The accelerator that tests run on: the double (far_device.py), or the device that QUANTKIT_DEVICE names.

    QUANTKIT_DEVICE=cuda python -m pytest tests/test_accelerator.py

`cpu` is allowed, too: it rehearses what a real device does with the tests. A real device adds up in another
order, and error feedback spreads the difference, so tests then compare closely instead of bit for bit; what
only the double counts, limits or lacks is skipped there.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

NAME = os.environ.get("QUANTKIT_DEVICE", "far")
REAL = NAME != "far"


class RealDevice:
    """What a real device tells of itself, by the double's names."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device) if device.type != "cpu" else None

    def reset(self) -> None:
        if self.module:
            self.module.synchronize()
            self.module.empty_cache()
            self.module.reset_peak_memory_stats()
        self.before = self._allocations()

    def _allocations(self) -> int:
        return self.module.memory_stats().get("allocation.all.allocated", 0) if self.module else 0

    @property
    def peak(self) -> int:
        """The most bytes of torch's tensors since `reset`; 0 on a CPU."""
        return self.module.max_memory_allocated() if self.module else 0

    @property
    def launches(self) -> collections.Counter[str]:
        """Empty if nothing ran: a real device counts allocations alone."""
        return +collections.Counter(allocations=self._allocations() - self.before if self.module else 1)


if REAL:
    DEVICE = RealDevice(torch.device(NAME))

    @contextmanager
    def present() -> Iterator[RealDevice]:
        """The device is there anyway; its counts begin anew."""
        DEVICE.reset()
        yield DEVICE

else:
    from far_device import DEVICE as DEVICE
    from far_device import present as present


@contextmanager
def exact_products() -> Iterator[None]:
    """Let error feedback multiply in float32 on CUDA too. In TF32, as usual there, it chooses other codes:
    on an H200 losses of tiny linears differ by up to 12 percent, and equally on a CPU that rounds to TF32.
    """
    with ExitStack() as stack:
        for room in ("solvers.gptq", "calibrate.statistics"):
            name = f"quantkit.quantize.{room}.tf32_products"
            stack.enter_context(mock.patch(name, lambda device: nullcontext()))
        yield


def far_apart(a: Path, b: Path) -> list[str]:
    """Names of tensors of two checkpoints that are not the same but for an order of summation.

    Error feedback spreads the last place of a sum over a row: some codes differ by a step. Another scale, a
    row or a column elsewhere differ by all of a weight.
    """
    from quantkit.models.files.open import open_checkpoint

    one, other = open_checkpoint(str(a)), open_checkpoint(str(b))
    stored = [{name: one_or.stored_as(name) for name in one_or.names} for one_or in (one, other)]
    if stored[0] != stored[1]:
        return sorted(stored[0].keys() ^ stored[1].keys()) or ["stored otherwise"]
    found = []
    for name in one.names:
        left, right = one.read(name).float(), other.read(name).float()
        if left.shape != right.shape or (left - right).norm() > 0.3 * left.norm():
            found.append(name)
    return found
