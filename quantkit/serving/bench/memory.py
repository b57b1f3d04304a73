"""Peak memory of this process, or of torch's allocator on an accelerator."""

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

from quantkit.models.machine.memory import resident

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Measures peak memory. device: torch's; None where another engine computes. how: what is measured.

    On a CPU: resident memory of the process, mapped files included, above its value when the Meter was
    created. So create it after the libraries are imported and before the model is loaded.
    """

    def __init__(self, device=None):
        self._module = None
        if device is not None and device.type not in ("cpu", "meta"):
            import torch

            self._module = torch.get_device_module(device)
            self._device = device
        self._base = 0 if self._module else resident()
        self.how = "allocated by torch on the device" if self._module else "resident, above the interpreter"

    def reset(self) -> None:
        """Start a new peak. Systems that cannot reset go on with the peak since the process started."""
        if self._module:
            if hasattr(self._module, "reset_peak_memory_stats"):
                self._module.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # absent, or read-only in some containers
                RESET.write_text("5")  # man 5 proc: resets the peak of resident memory

    def peak(self) -> int | None:
        """Return the peak in bytes; None where the device does not count."""
        if self._module:
            counted = getattr(self._module, "max_memory_allocated", None)
            return counted(self._device) if counted else None
        if STATUS.exists():
            most = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())[1])
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            most = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(0, most - self._base)
