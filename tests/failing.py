"""Let the n-th call of a process fail, by a library between it and the system (scripts/faults.c).

`forked.Server(LD_PRELOAD=library)` runs commands behind it, and `call=("failing:begin", ...)` sets it up."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import forked

SOURCE = Path(__file__).parents[1] / "scripts/faults.c"


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> str:
    """The library, made there."""
    library = str(folder / "faults.so")
    subprocess.run([compiler(), "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def begin(library: str, where: str, kind: str, number: int, error: int) -> None:
    """From now on: the `number`-th call that writes ("w") below a folder, or reads ("r") from it, fails with
    an errno; 0: none does; -n: all do from the n-th on. How many there were is in `count` at the end."""
    shim = ctypes.CDLL(library)
    shim.fault_set.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    shim.fault_set(where.encode(), ord(kind), number, error)
    place = Path("count").absolute()
    atexit.register(lambda: place.write_text(str(shim.fault_count())))


def unread(*descriptors: int) -> None:
    """They lead to a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in descriptors:
        os.dup2(writer, descriptor)
    os.close(writer)


def clock_back(seconds: float) -> None:
    """From its third reading on, the clock goes back by so much with each."""
    real, reads = time.time, []

    def read() -> float:
        reads.append(None)
        return real() - seconds * max(0, len(reads) - 2)

    time.time = read


def slow() -> None:
    """Waits where a kill could do harm: between record and tensors, before the rename, in the merge."""
    places = ["quantkit.quantize.staging.blocks:save_file", "os:replace"]
    places += [
        "quantkit.models.files.safetensors_folder:write_file",
        "quantkit.quantize.outputs.finish:_verify",
    ]
    for place in [*places, "quantkit.quantize.outputs.folder:write_json"]:
        forked.before(place, 0, lambda: time.sleep(0.06))


def swallow(call: int) -> None:
    """What torch makes of an interrupt while the `call`-th block is read: seen in one of a hundred."""

    def interrupt() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type 'UntypedStorage'") from None

    forked.before("quantkit.models.skeleton:Skeleton.load_block", call, interrupt)


def hash_beside(seconds: float) -> None:
    """The source counts as large: its hash takes so long, and a block a second."""
    from quantkit.quantize import job

    job.HASHED_AT_ONCE = 0
    forked.before("quantkit.models.files.checkpoint:Checkpoint.sha256", 0, lambda: time.sleep(seconds))
    forked.before("quantkit.quantize.staging.folder:Staging.write_block", 1, lambda: time.sleep(1))
