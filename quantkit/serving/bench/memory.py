"""How much memory was used at most: by this process, or on an accelerator by torch's allocator."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from quantkit.models.machine.memory import resident

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Peak above what was there when it was made. device: None where torch does not compute, or its device.

    On a CPU that is the resident memory of the process, mapped files among it. Make one after the libraries
    are imported and before anything is loaded.
    """

    def __init__(self, device=None):
        self._module = None
        if device is not None and device.type not in ("cpu", "meta"):
            import torch

            self._module = torch.get_device_module(device)
            self._device = device
        self._base = 0 if self._module else resident()

    @property
    def how(self) -> str:
        """What the figures are, for people."""
        return "allocated by torch on the device" if self._module else "resident, above the interpreter"

    def reset(self) -> None:
        """From now on the peak counts anew; where the system cannot do so, it is the one since the start."""
        if self._module:
            if hasattr(self._module, "reset_peak_memory_stats"):
                self._module.reset_peak_memory_stats(self._device)
        elif RESET.exists():
            RESET.write_text("5")  # man 5 proc: resets the peak of resident memory

    def peak(self) -> int | None:
        """Bytes; None where the device does not tell."""
        if self._module:
            told = getattr(self._module, "max_memory_allocated", None)
            return told(self._device) if told else None
        return max(0, _peak_resident() - self._base)


def _peak_resident() -> int:
    """Most bytes that were resident at a time."""
    if STATUS.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
