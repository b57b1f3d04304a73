"""The most memory that a piece of work holds at once, above what was held before it.

On an accelerator its allocator counts: exact to the byte. On a CPU it is the kernel's high-water mark of the
process (VmHWM), set back to the present by writing 5 into /proc/self/clear_refs (proc(5)), which costs
microseconds where a process of its own for each measurement costs seconds. It sees what every library
allocates, in whole pages. Freed pages that malloc keeps would blur it by megabytes, so while it is watched
every block of 64 KiB or more is mapped by itself: then it agrees to a few pages with what torch's allocator
counts. Neither are pages of 2 MiB taken then, which count as a whole; torch is not to ask for them either
(THP_MEM_ALLOC_ENABLE), since it aligns to their size and leaves holes. That costs page faults, so nothing is
timed meanwhile. Pages of files (a library's code, which the kernel drops and reads again as it likes) are in
the mark, too; those that came since are taken off it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quantkit.models.machine.device import is_accelerator, synchronize
from quantkit.models.machine.heap import forbid_huge_pages, map_large_blocks, return_freed_pages

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what sets VmHWM to VmRSS
WATCHED, USUAL = 64 << 10, 32 << 20  # bytes of blocks that malloc maps: watched, and as glibc settles itself


class Peak:
    """`with peak.watching():` `begin()`, the work, `nbytes()`, of which several fit into one `with`.

    how: in words. nbytes() is None where the system tells no peak.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._module = torch.get_device_module(device) if is_accelerator(device) else None
        self._before = self._files = 0
        if self._module is not None:
            self.known = hasattr(self._module, "reset_peak_memory_stats")
            self.how = "peak of the device's allocator" if self.known else "not told by this device"
        else:
            self.known = _resettable()
            self.how = (
                "peak of the process (VmHWM, reset by /proc/self/clear_refs)"
                if self.known
                else "not measured: this system does not let a process reset its peak"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is freed inside leaves the process, and the measurement."""
        if self._module is None:
            map_large_blocks(WATCHED)
            forbid_huge_pages()
        try:
            yield
        finally:
            if self._module is None:
                map_large_blocks(USUAL)
                forbid_huge_pages(False)

    def begin(self) -> None:
        """From here on; what is held now counts as nothing."""
        self.restart()
        if self.known:
            accelerator = self._module is not None
            self._before = self._module.memory_allocated(self.device) if accelerator else _pages("VmRSS")
            self._files = 0 if accelerator else _pages("RssFile")

    def restart(self) -> None:
        """Forget the peak so far, and count on from where `begin` was."""
        synchronize(self.device)
        if self._module is None:
            return_freed_pages()
            if self.known:
                CLEAR.write_text(RESET_PEAK)
        elif self.known:
            self._module.reset_peak_memory_stats(self.device)

    def nbytes(self) -> int | None:
        """The most that was held since, above what was held at `begin`."""
        if not self.known:
            return None
        synchronize(self.device)
        if self._module is not None:
            return self._module.max_memory_allocated(self.device) - self._before
        return max(0, _pages("VmHWM") - self._before - max(0, _pages("RssFile") - self._files))


def _resettable() -> bool:
    try:
        CLEAR.write_text(RESET_PEAK)
        return _pages("VmHWM") > 0
    except OSError:
        return False


def _pages(field: str) -> int:
    """Bytes that /proc/self/status gives for VmRSS, RssFile or VmHWM; 0 where it has no such line."""
    lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    return int(found.split()[1]) * 1024 if found else 0
