"""Freed memory goes back to the system, so that a job's peak is what it needs and not its history."""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_BYTES = 4 << 20

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def map_large_blocks() -> None:
    """Make glibc map and unmap every allocation of `MAPPED_BYTES` or more by itself.

    Left alone it raises that threshold to 32 MiB as such blocks are freed, and keeps what lies
    below in a heap that fragments. No effect where there is no glibc.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def return_freed_pages() -> None:
    """Give whole free pages of the heap back: its holes grow from block to block otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
