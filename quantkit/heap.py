"""Freed memory goes back to the system, so that a job's peak is what it needs and not its history."""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD = -3  # malloc.h
RETURNED_BYTES = 8 << 20


def return_freed_memory() -> None:
    """Make glibc map and unmap every allocation of 8 MiB or more by itself.

    Left alone it raises that threshold to 32 MiB as such blocks are freed, and keeps what lies
    below in a heap that fragments: the peak of a block then varies by a third. No effect elsewhere.
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
