"""Host memory that a process may still allocate, limited by the system, a container, the shell or the user.
torch is not imported, because `quantkit plan` uses this module.

Containers: `memory.max` of control groups in version 2, `memory.limit_in_bytes` in version 1, of the group
and its ancestors (kernel.org, admin-guide/cgroup-v2 and cgroup-v1/memory). Cached pages of files count as
free, because the kernel drops them before it kills a process.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from quantkit.models.machine import distributed

TENTH = 10**8  # bytes: sizes are said in tenths of a GB
RESERVE = 256 << 20  # address space of threads' heaps (glibc reserves 64 MiB each) and stacks


@dataclass(frozen=True)
class Room:
    """Bytes that the process may still allocate. whose: words for a message: "1 GB are `whose`"."""

    nbytes: int
    whose: str = "free"


@dataclass(frozen=True)
class Limit:
    """The user's limit of the whole process in bytes. resident: resident memory when the job began."""

    nbytes: int
    resident: int

    @staticmethod
    def of(max_memory: int | None) -> Limit | None:
        """Return the limit; None if the user set none."""
        return None if max_memory is None else Limit(max_memory, resident())

    @property
    def left(self) -> int:
        """Return the bytes that remain for the job."""
        return max(0, self.nbytes - self.resident)

    def raised(self, need: int) -> str:
        """Return the flag of a limit that leaves `need` bytes. The resident memory varies from run to run."""
        return f"--max-memory {-(-(self.resident * 21 // 20 + need) // TENTH) / 10:g}GB"


def room() -> Room:
    """Return the smallest of the limits of the system, the container and the shell.

    The memory of a host or container is divided by the ranks on it; other limits hold per process.
    """
    shared = [Room(psutil.virtual_memory().available), *containers()]
    rooms = [Room(room.nbytes // distributed.local(), room.whose) for room in shared]
    return min([*rooms, *_of_process()], key=lambda room: room.nbytes)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def _of_process() -> Iterator[Room]:
    """Yield what `ulimit` leaves of address space (-v) and of data memory (-d)."""
    for kind, field, flag in ((resource.RLIMIT_AS, "vms", "-v"), (resource.RLIMIT_DATA, "data", "-d")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            used = psutil.Process().memory_info()
            left = limit - getattr(used, field, used.vms) - RESERVE
            yield Room(max(0, left), f"left by ulimit {flag}")


def containers(root: Path = Path("/")) -> list[Room]:
    """Return the memory that each control group of this process leaves. root: of the file system."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    rooms: list[Room] = []
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0" and not kinds:
            rooms += _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in kinds.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            rooms += _groups(root / "sys/fs/cgroup/memory", path, *files, "total_")
    return rooms


def _groups(mount: Path, path: str, limit_file: str, usage_file: str, prefix: str) -> Iterator[Room]:
    """Yield the memory that a group and its ancestors leave. Inside a container the group's path may be
    absent; then the mount point itself is the group. prefix: of the names in memory.stat."""
    innermost = mount / path.lstrip("/")
    for group in (innermost, *innermost.parents):
        if not group.is_relative_to(mount):
            return
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None:
            left = limit - usage + _cached(group / "memory.stat", prefix)
            yield Room(max(0, left), "left in its container")


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file says `max` or is absent."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(path: Path, prefix: str) -> int:
    """Return the bytes of cached file pages in a group."""
    try:
        rows = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
    except OSError:
        return 0
    return sum(int(rows.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


# ---- freed memory: returned at once, or kept for the next block
#
# A job with calibration allocates tensors of different sizes: freed pages are returned, so that its peak does
# not depend on its history. A data-free job reads weights once: fresh pages would cost more than arithmetic.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
MAPPED_BYTES = 32 << 20  # glibc's largest threshold: smaller tensors use the same pages again
MMAP_MAX = 65536  # glibc's default
NEVER = 2**31 - 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_keeping = False


def map_large_blocks() -> None:
    """Make glibc map and unmap every allocation of at least MAPPED_BYTES separately, and keep as much free
    memory at the end of the heap. No effect without glibc.
    """
    global _keeping
    _keeping = False
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_MAX, MMAP_MAX)
        _libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        _libc.mallopt(M_TRIM_THRESHOLD, MAPPED_BYTES)


def keep_freed_pages() -> None:
    """Make glibc keep freed memory for later allocations, until `map_large_blocks` is called."""
    global _keeping
    _keeping = True
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_MAX, 0)
        _libc.mallopt(M_TRIM_THRESHOLD, NEVER)


@contextmanager
def mapped() -> Iterator[None]:
    """Map large blocks separately inside this context, even if freed pages are kept: tensors that live as
    long as the job would leave holes in the heap."""
    kept = _keeping
    map_large_blocks()
    try:
        yield
    finally:
        if kept:
            keep_freed_pages()


def return_freed_pages(also_kept: bool = False) -> None:
    """Return free pages of the heap to the system, unless freed pages are kept. also_kept: even then; needed
    inside blocks with many experts, where holes in the heap grow."""
    if hasattr(_libc, "malloc_trim") and (also_kept or not _keeping):
        _libc.malloc_trim(0)
