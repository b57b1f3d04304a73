"""Features of this processor, found without torch, because `plan` runs before torch is imported.

QUANTKIT_PROCESSOR overrides them for tests and CI. `poor`: no features. `capable`: bfloat16, which torch can
always emulate slowly; int8 products only if the machine has them.
"""

import functools
import os
import platform
from pathlib import Path

from quantkit.errors import USAGE, require

ANSWER = "QUANTKIT_PROCESSOR"
CPUINFO = Path("/proc/cpuinfo")  # exists on Linux; other systems count as without features


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively; otherwise torch converts, many times slower.

    oneDNN requires AVX512_BF16, even for AMX; on Arm, BF16. macOS has neither oneDNN nor this list.
    """
    answer = _answer()
    return answer == "capable" if answer else bool(_flags() & {"avx512_bf16", "bf16"})


def has_int8_products() -> bool:
    """Return whether `torch._int_mm` is fast and exact: from AVX512_VNNI on.

    A processor without it gets a scalar loop, a hundred times slower than float32.
    """
    return _answer() != "poor" and "avx512_vnni" in _flags()


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def threads() -> int:
    """Return the number of threads that torch uses by default."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(requested) if requested.isdecimal() and int(requested) else cores()


def name() -> str:
    """Return the maker's name of the processor, or at least its architecture."""
    return " ".join(_values(CPUINFO, ("model name",))) or platform.processor() or platform.machine()


def _answer() -> str:
    answer = os.environ.get(ANSWER, "")
    require(answer in ("", "poor", "capable"), f"{ANSWER} is {answer!r}", "it may be poor or capable", USAGE)
    return answer


def _flags() -> frozenset[str]:
    """Return Linux's names of the features of the first core, on x86 and Arm."""
    return frozenset(_values(CPUINFO, ("flags", "Features")))


@functools.cache
def _values(path: Path, names: tuple[str, ...]) -> list[str]:
    """Return the words of the first line of `path` that begins with one of `names`; [] if none does."""
    try:
        with path.open(errors="replace") as lines:
            for line in lines:
                name, _, words = line.partition(":")
                if name.strip() in names:
                    return words.split()
    except OSError:
        pass
    return []
