"""Let the n-th call of a process fail, by a library between it and the system (scripts/faults.c).

`forked.Server(LD_PRELOAD=library)` runs commands behind it, and `call=("failing:begin", ...)` sets it up."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "scripts/faults.c"
ALL = -1  # every call fails


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> str:
    """The library, made there."""
    library = str(folder / "faults.so")
    subprocess.run([compiler(), "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def begin(library: str, where: str, kind: str, number: int, error: int) -> None:
    """From now on: the `number`-th call that writes ("w") below a folder, or reads ("r") from it, fails with
    an errno; 0: none does, `ALL`: all do. How many there were is in `count` when the process ends."""
    shim = ctypes.CDLL(library)
    shim.fault_set.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    shim.fault_set(where.encode(), ord(kind), number, error)
    place = Path("count").absolute()
    atexit.register(lambda: place.write_text(str(shim.fault_count())))
