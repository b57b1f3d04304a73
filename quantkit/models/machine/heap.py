"""What becomes of freed memory: given back at once, or kept for the next block.

A job with calibration holds tensors of many sizes; its peak must be what it needs and not its history. A
data-free job passes over weights once, and fresh pages would cost it more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
MAPPED_BYTES = 4 << 20
MMAP_MAX = 65536  # glibc's default
NEVER = 2**31 - 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_keeping = False


def map_large_blocks(least: int = MAPPED_BYTES) -> None:
    """Make glibc map and unmap every allocation of `least` bytes or more by itself.

    Left alone it raises that threshold to 32 MiB as such blocks are freed, and keeps what lies
    below in a heap that fragments. No effect where there is no glibc.
    """
    global _keeping
    _keeping = False
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_MAX, MMAP_MAX)
        _libc.mallopt(M_MMAP_THRESHOLD, least)


def keep_freed_pages() -> None:
    """Make glibc keep what is freed for the next allocation, however large; undone by `map_large_blocks`."""
    global _keeping
    _keeping = True
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_MAX, 0)
        _libc.mallopt(M_TRIM_THRESHOLD, NEVER)


@contextmanager
def mapped() -> Iterator[None]:
    """Meanwhile large blocks are mapped one by one, also in a job that keeps what is freed: for what stays as
    long as the job does, and what it is made of, which would leave a hole as large."""
    kept = _keeping
    map_large_blocks()
    try:
        yield
    finally:
        if kept:
            keep_freed_pages()


def return_freed_pages(also_kept: bool = False) -> None:
    """Give whole free pages of the heap back, unless they are kept: its holes grow from block to block, and
    inside a block of many experts, for which even kept pages are given back."""
    if hasattr(_libc, "malloc_trim") and (also_kept or not _keeping):
        _libc.malloc_trim(0)
